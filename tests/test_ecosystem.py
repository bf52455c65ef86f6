"""The libraries around: PEFT, pipelines, torch.compile and torch.export, the Trainer of transformers."""

import pytest
import torch
from conftest import assert_close
from texts import byte_tokenizer
from tiny import DTYPE, EVERY, build, config_of, gradients, greedy, tokens

from fastweight.data import load_tokenizer
from fastweight.models import FastWeightForCausalLM

# What torch and PEFT say about themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo asks
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize("mixer", EVERY)
def test_lora_trains_generates_and_merges(mixer, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = build(mixer), tokens(2, 9)
    before = {name: value.clone() for name, value in model.named_parameters()}
    plain = model(ids).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["qkv_proj", "o_proj"], task_type="CAUSAL_LM")
    )
    assert_close(adapted(input_ids=ids).logits, plain, DTYPE)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    adapted.eval()
    logits, said = adapted(input_ids=ids).logits, adapted.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(mixer), tmp_path)
    assert_close(again(input_ids=ids).logits, logits, DTYPE)
    merged = adapted.merge_and_unload()
    assert_close(merged(ids).logits, logits, DTYPE)
    assert (greedy(merged, ids, max_new_tokens=4) == said).all()
    moved = {name for name, value in merged.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all("qkv_proj" in name or "o_proj" in name for name in moved)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")).to_transformers()


@pytest.mark.parametrize("mixer", ["falcon-1", "mamba2", "hybrid"])
def test_a_text_pipeline_answers_a_batch_as_it_does_single_prompts(mixer, tokenizer):
    from transformers import pipeline

    generate = pipeline("text-generation", model=build(mixer, vocab_size=len(tokenizer)), tokenizer=tokenizer)
    prompts = ["the river", "a", "old house sings over"]
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    batched = generate(prompts, batch_size=3, **options)
    single = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    assert [answer[0]["generated_text"] for answer in batched] == single


@pytest.mark.parametrize("mixer", ["falcon-1", "transformer"])
def test_compiles_without_graph_breaks(mixer):
    model, ids = build(mixer, num_hidden_layers=1), tokens(2, 9)
    # Without knowing the length, as it is traced once two lengths were seen.
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=mixer == "transformer")
    assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, DTYPE)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "torch"), *(pytest.param("cuda", backend, marks=pytest.mark.gpu) for backend in ("auto", "torch"))],
)
@pytest.mark.parametrize("mixer", EVERY)
def test_compiled_blocks_have_the_gradients_of_blocks_as_they_are(mixer, device, backend):
    """torch 2.11 compiles zeros where a forward of an autograd.Function returns what it has written in place."""
    torch.compiler.reset()
    ids, found = tokens(2, 21).to(device), []
    for compiled in (False, True):
        # Small: rotations for the eigenvalues of windows of 4 take half a minute to trace.
        sizes = {"num_hidden_layers": 2 if mixer == "hybrid" else 1, "window": 2}
        model = build(mixer, torch.float32, backend=backend, **sizes).to(device).train()
        for block in model.model.layers if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        loss = model(ids, labels=ids, use_cache=False).loss
        found.append([loss, *gradients(model, loss)])
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, one, other in zip(names, *found, strict=True):
        assert_close(one, other, torch.float32, "gradient", name)


@torch.no_grad()  # at the break Dynamo asks hidden states for .grad, which warns
def test_compiled_code_keeps_packed_documents_apart():
    model, ids = build("hybrid", num_hidden_layers=2), tokens(1, 9)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    expected = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], dim=1)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):  # what is compiled, and in which frames, differs from call to call
        assert_close(compiled(ids, **packed).logits, expected, DTYPE)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(model, backend="eager", fullgraph=True)(ids, **packed)


@torch.no_grad()
def test_generates_through_a_forward_that_is_compiled_whole():
    model, ids = build("falcon-1", num_hidden_layers=1), tokens(1, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_exports():
    model, ids = build("falcon-1a", num_hidden_layers=1), tokens(2, 9)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        assert_close(exported.module()(ids, use_cache=False).logits, model(ids).logits, DTYPE)


@pytest.mark.parametrize("mixer", ["falcon-3", "hybrid"])
def test_the_trainer_of_transformers_trains_evaluates_and_reloads(mixer, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 9)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-2, save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
        dataloader_pin_memory=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = FastWeightForCausalLM(config_of(mixer))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before
    again = FastWeightForCausalLM.from_pretrained(tmp_path / "checkpoint-3").eval()
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        assert again(ids, labels=ids).loss.item() == pytest.approx(after, rel=1e-5)
