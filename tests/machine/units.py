"""What a program reaches beyond its registers: global memory, shared memory, copies between them, matrix units.

Global memory: what is masked out is not read and reads as NaN, the rest lies inside its tensor; no copy out begins at a
negative row; no two writers of a launch disagree about an element, and no program writes what another one reads. Shared
memory: memory.py.
"""

import types
from typing import Any

import torch

from tests.machine.memory import Barrier, Hazard, Memory, Span
from tests.machine.words import Tile, tile, word


class Program:
    """The program that is being run."""

    def __init__(self, ids: tuple[int, ...], number: int) -> None:
        self.ids, self.number = ids, number
        self.memory = Memory()
        self.products: list[Product] = []
        self.leaving: list[Any] = []
        self.copies: list[list[Any]] = [[]]  # by group, the last one not yet committed


class Launch:
    grid: tuple[int, ...]
    program: Program
    writers: dict[int, torch.Tensor]
    readers: dict[int, torch.Tensor]


LAUNCH = Launch()


class Pointer:
    """An address in a tensor's memory, counted in its elements from where the tensor begins."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.at + other)

    def __sub__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.at - other)

    def where(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and mask, of one shape; what is masked out lies at 0."""
        at, keep = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        at = torch.where(keep, at, 0).long()
        room = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize - self.tensor.storage_offset()
        if keep.any() and not (int(at.min()) >= 0 and int(at.max()) < room):
            raise Hazard(f"reaches element {int(at.min())} to {int(at.max())} of a tensor of {room}")
        return at, keep

    @property
    def words(self) -> torch.Tensor:
        room = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize - self.tensor.storage_offset()
        return self.tensor.as_strided((room,), (1,))


def _noted(notes: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """What is noted of every element of a tensor, a number that is 0 at first."""
    key = tensor.untyped_storage().data_ptr() + tensor.itemsize  # numbers of each size have notes of their own
    if key not in notes:
        notes[key] = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.int32)
    return notes[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


SEVERAL = -1  # in the place of a program's number


def read(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index], which no other program of this launch wrote."""
    me, written = LAUNCH.program.number, _noted(LAUNCH.writers, tensor)[index]
    if ((written > 0) & (written // 2 != me)).any():
        raise Hazard("reads what another program writes")
    readers = _noted(LAUNCH.readers, tensor)
    before = readers[index]
    readers[index] = torch.where((before == 0) | (before == me), me, SEVERAL).int()
    return tensor[index]


def write(tensor: torch.Tensor, index: Any, values: torch.Tensor, copied: bool) -> None:
    """tensor[index] = values, by a copy or by threads; what anybody else of this launch wrote has to be the same."""
    known, readers = _noted(LAUNCH.writers, tensor), _noted(LAUNCH.readers, tensor)[index]
    me = 2 * LAUNCH.program.number + copied
    if ((readers != 0) & (readers != LAUNCH.program.number)).any():
        raise Hazard("writes what another program reads")
    others = (known[index] > 0) & (known[index] != me) & (tensor[index] != values)
    if others.any():
        raise Hazard(f"{int(others.sum())} elements are written by two, and differently")
    known[index] = me
    tensor[index] = values


@word
def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tile:
    at, keep = pointer.where(mask)
    words = pointer.words
    found = torch.zeros(at.shape, dtype=words.dtype)
    plain = at.as_subclass(torch.Tensor), keep.as_subclass(torch.Tensor)
    found[plain[1]] = read(words, plain[0][plain[1]])
    missing = (float("nan") if found.is_floating_point() else 0) if other is None else other
    return tile(torch.where(keep, found, torch.as_tensor(missing, dtype=found.dtype)))


@word
def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, keep = pointer.where(mask)
    values = torch.as_tensor(value).to(pointer.tensor.dtype).broadcast_to(at.shape)
    plain = [part.as_subclass(torch.Tensor) for part in (at, keep, values)]
    write(pointer.words, plain[0][plain[1]], plain[2][plain[1]], False)


class Descriptor:
    """What a copy of a box knows: a tensor and the size of the box."""

    def __init__(self, host: Any) -> None:
        self.tensor = torch.as_strided(host.base, host.shape, host.strides)
        self.block_shape, self.dtype = list(host.block_shape), host.base.dtype
        self.layout = "tiled"
        self.block_type = types.SimpleNamespace(nbytes=self.dtype.itemsize * torch.Size(self.block_shape).numel())
        if host.base.data_ptr() % 16 or any(stride * self.dtype.itemsize % 16 for stride in host.strides[:-1]):
            raise Hazard("a descriptor of memory that is not aligned to 16 bytes")

    def overlap(self, coords: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the box lies in the tensor, and the part of the box that does."""
        inside, part = [], []
        for at, size, whole in zip(map(int, coords), self.block_shape, self.tensor.shape, strict=True):
            low, high = max(at, 0), min(at + size, whole)
            high = max(low, high)
            inside.append(slice(min(low, whole), min(high, whole)))
            part.append(slice(low - at, low - at + inside[-1].stop - inside[-1].start))
        return tuple(inside), tuple(part)


class Shared:
    """A view of shared memory. `how`: its arrangement, which views of another shape do not share."""

    def __init__(self, block: int, data: torch.Tensor, how: Any) -> None:
        self.block, self.data, self.how = block, data, how
        self.dtype, self.shape = data.dtype, list(data.shape)

    @property
    def span(self) -> Span:
        low = int(self.data.storage_offset()) * self.data.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.data.shape, self.data.stride(), strict=True))
        return Span(self.block, low, low + int(last + 1) * self.data.itemsize)

    def _view(self, data: torch.Tensor) -> "Shared":
        return Shared(self.block, data, self.how)

    def index(self, at: Any) -> "Shared":
        return self._view(self.data[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(self.data.narrow(dim, int(start), length))

    def permute(self, order: Any) -> "Shared":
        return self._view(self.data.permute(order))

    def reshape(self, shape: list[int]) -> "Shared":
        return self._view(self.data.view(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        data = LAUNCH.program.memory.blocks[self.block]
        data = data[self.span.low :][: torch.Size(shape).numel() * dtype.itemsize]
        assert len(data) == torch.Size(shape).numel() * dtype.itemsize, "a view larger than its memory"
        return Shared(self.block, data.view(dtype).view(shape), arrangement(layout, shape))

    def load(self, layout: Any = None) -> Tile:
        LAUNCH.program.memory.by_threads(self.span, False)
        LAUNCH.program.memory.check_arranged(self.span, self.how)
        return tile(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.dtype, f"stores {value.dtype} as {self.dtype}"
        assert list(value.shape) == self.shape, f"stores {list(value.shape)} as {self.shape}"
        LAUNCH.program.memory.by_threads(self.span, True)
        LAUNCH.program.memory.arrange(self.span, self.how)
        self.data.copy_(value.as_subclass(torch.Tensor))

    def _keep_alive(self) -> None:
        pass


def arrangement(layout: Any, shape: list[int]) -> Any:
    """Of tiles up to 64 columns each row is whole, wider ones lie in panels of all their rows."""
    if layout != "tiled":
        return "rows"
    return (shape[-1],) if shape[-1] <= 64 else tuple(shape[-2:])


@word
def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any, value: Any = None) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    block, data = LAUNCH.program.memory.allocate(torch.Size(shape).numel() * dtype.itemsize)
    made = Shared(block, data.view(dtype).view(shape), arrangement(layout, shape))
    if value is not None:
        made.store(value)
    return made


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]

    def _keep_alive(self) -> None:
        pass


def _one(barrier: Any) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.index(0)


class Mbarrier:
    MBarrierLayout = staticmethod(lambda: "barrier")

    @staticmethod
    def init(barrier: Any, count: int) -> None:
        assert count == 1, "one thread announces"

    @staticmethod
    def expect(barrier: Any, nbytes: int, pred: Any = True) -> None:
        if pred:
            assert not _one(barrier).armed, "announced twice in a phase"
            _one(barrier).armed = True

    @staticmethod
    def wait(barrier: Any, phase: Any) -> None:
        LAUNCH.program.memory.wait(_one(barrier), int(phase))


class Tma:
    @staticmethod
    def async_copy_global_to_shared(desc: Descriptor, coords: Any, barrier: Any, shared: Shared, pred: Any = True):
        if not pred:
            return
        assert list(shared.shape) == desc.block_shape, f"a box of {desc.block_shape} into {shared.shape}"
        memory = LAUNCH.program.memory
        if not _one(barrier).armed:
            raise Hazard("a copy whose bytes were not announced")
        inside, part = desc.overlap(coords)

        def land() -> None:
            shared.data.zero_()
            shared.data[part] = read(desc.tensor, inside)

        memory.by_copy(shared.span, _one(barrier), land)
        memory.arrange(shared.span, shared.how)

    @staticmethod
    def async_copy_shared_to_global(desc: Descriptor, coords: Any, shared: Shared) -> None:
        assert list(shared.shape) == desc.block_shape, f"a box of {shared.shape} as {desc.block_shape}"
        if any(int(at) < 0 for at in coords):
            raise Hazard(f"a copy out begins at {[int(at) for at in coords]}")
        program = LAUNCH.program
        use = program.memory.by_unit(shared.span, "a copy out")
        program.memory.check_arranged(shared.span, shared.how)
        program.leaving.append((use, desc, coords, shared))

    @staticmethod
    def store_wait(pendings: int) -> None:
        assert pendings == 0, "waits for some copies out"
        program = LAUNCH.program
        for use, desc, coords, shared in program.leaving:
            inside, part = desc.overlap(coords)
            write(desc.tensor, inside, shared.data[part], True)
            use.done = program.memory.epoch
        program.leaving.clear()


class AsyncCopy:
    @staticmethod
    def async_copy_global_to_shared(shared: Shared, pointer: Pointer, mask: Any = None) -> None:
        LAUNCH.program.memory.by_threads(shared.span, True)
        LAUNCH.program.memory.arrange(shared.span, shared.how)
        shared.data.view(torch.int16).fill_(-1)  # NaN, until somebody waits
        LAUNCH.program.copies[-1].append((shared, load(pointer, mask, 0)))

    @staticmethod
    def commit_group() -> None:
        LAUNCH.program.copies.append([])

    @staticmethod
    def wait_group(pendings: int) -> None:
        """Until all groups but the last so many are there, which is when threads wrote them."""
        program = LAUNCH.program
        while len(program.copies) > pendings + 1:
            for shared, value in program.copies.pop(0):
                shared.data.copy_(value)
                program.memory.by_threads(shared.span, True)


class Product:
    """a b + acc of the matrix units, made when it is waited for."""

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.value: Any = None
        memory = LAUNCH.program.memory
        views = [part for part in (a, b) if isinstance(part, Shared)]
        self.uses = [memory.by_unit(view.span, "a product") for view in views]
        for view in views:
            memory.check_arranged(view.span, view.how)

    def finish(self) -> None:
        a, b = (part.data if isinstance(part, Shared) else part for part in (self.a, self.b))
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        assert a.dtype == b.dtype, f"a product of {a.dtype} and {b.dtype}"
        made = a.as_subclass(torch.Tensor).float() @ b.as_subclass(torch.Tensor).float()
        self.value = tile(made if acc is None else made + acc)
        for use in self.uses:
            use.done = LAUNCH.program.memory.epoch


@word
def warpgroup_mma(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc if use_acc else None)
    LAUNCH.program.products.append(product)
    return product if is_async else warpgroup_mma_wait(0, [product])


@word
def warpgroup_mma_wait(pendings: int, deps: Any) -> Any:
    queue = LAUNCH.program.products
    while len(queue) > pendings:
        queue.pop(0).finish()
    values = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
    if any(value is None for value in values):
        raise Hazard("takes the result of a product that was not waited for")
    return values[0] if len(values) == 1 else values


@word
def fence_async_shared() -> None:
    LAUNCH.program.memory.fence()


@word
def thread_barrier() -> None:
    LAUNCH.program.memory.barrier()


@word
def program_id(axis: int) -> Tile:
    ids = LAUNCH.program.ids
    return tile(torch.tensor(ids[axis] if axis < len(ids) else 0, dtype=torch.int32))


@word
def num_programs(axis: int) -> int:
    return LAUNCH.grid[axis]
