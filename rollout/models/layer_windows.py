"""Which layers of a config.json slide, and over how many tokens: every family has a rule of its own."""

from __future__ import annotations

from .config_reader import ConfigReader

LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_windows(config: ConfigReader, architecture: str, num_layers: int, context: int) -> tuple[int, ...]:
    """Per layer the keys a token sees, itself included, 0 for all; empty if every layer sees all. Problems are noted in `config`."""
    window, slides = _rule(config, architecture, num_layers)
    types = config.texts("layer_types")
    if types:
        if unknown := sorted({kind for kind in types if kind not in LAYER_TYPES}):
            config.unsupported.append(f"layer_types {', '.join(unknown)} (supported: {', '.join(LAYER_TYPES)})")
        elif len(types) != num_layers and not config.malformed:
            config.bad("layer_types", f"{len(types)} of them", f"one for each of the {num_layers} layers")
        named = [kind == "sliding_attention" for kind in types]
        if named != slides and (not window or architecture == "MistralForCausalLM"):
            computed = f"window {window} in every layer" if window else "no window"
            config.unsupported.append(f"layer_types that slide elsewhere than {architecture} ({computed}): drop layer_types")
        slides = named
    if architecture == "Gemma3ForCausalLM":  # its sliding layers rotate by a theta of their own, however far they see
        window = min(window, context)
    elif window >= context:
        return ()
    return tuple(window if sliding else 0 for sliding in slides) if any(slides) else ()


def _rule(config: ConfigReader, architecture: str, num_layers: int) -> tuple[int, list[bool]]:
    """(window, which layers slide where layer_types says nothing). A missing sliding_window is 4096, as in the families' classes."""
    nowhere = [False] * num_layers
    if architecture == "LlamaForCausalLM":
        return 0, nowhere
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        if not config.flag("use_sliding_window"):
            return 0, nowhere
        first = config.size("max_window_layers", 28, least=0)
        slides = [i >= first for i in range(num_layers)]
    elif architecture == "MistralForCausalLM":
        slides = [True] * num_layers
    else:  # Gemma: every second layer sees all, or every sixth
        pattern = 2 if architecture == "Gemma2ForCausalLM" else config.size("sliding_window_pattern", 6)
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    if "sliding_window" in config.raw and not config.has("sliding_window"):
        if architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
            config.bad("sliding_window", None, "a whole number: some of the layers slide")
        return 0, nowhere
    return config.size("sliding_window", 4096), slides
