"""Stands in for flash-attn, which needs a CUDA compiler. OpenRLHF imports it for packed samples, which no test here uses."""
