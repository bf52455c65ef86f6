"""Trained models into figures: perplexity, tasks of lm-evaluation-harness, addition by width, samples of text."""
