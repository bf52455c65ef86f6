"""Layers: hidden states in, hidden states and a layer state out. `FastWeightAttention`, other mixers, their parts."""
