"""Names that OpenRLHF imports."""


def _absent(*args, **kwargs):
    raise RuntimeError("flash-attn is not installed: leave --ds.packing_samples out")


index_first_axis = pad_input = rearrange = unpad_input = _absent
