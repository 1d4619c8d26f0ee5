"""One fingerprint for every build, and a wrong build is found when it is loaded."""

from __future__ import annotations

import pytest
from rollsync import Engine
from rollsync.kernels import fingerprint
from rollsync.kernels.fingerprint import EXPECTED, failed_probes, numerics_fingerprint, probe_digests
from rollsync.kernels.native_lib import BUILDS, available_builds, load_build
from rollsync.rollout.engine import devices
from rollsync.rollout.errors import ConfigError


@pytest.mark.parametrize("build", [*BUILDS, "reference"])
def test_every_build_and_the_reference_have_the_digests_written_down(build: str) -> None:
    if build not in (*available_builds(), "reference"):
        pytest.skip(f"no {build} here")
    library = None if build == "reference" else load_build(build)
    assert probe_digests(library) == EXPECTED and failed_probes(library) == []
    assert numerics_fingerprint(library, 4) == "v1-k4-d2debed52726"


def test_shards_and_head_are_part_of_the_fingerprint() -> None:
    assert len({numerics_fingerprint(None, 1), numerics_fingerprint(None, 4), numerics_fingerprint(None, 4, "float32")}) == 3


def test_a_build_with_other_bits_is_refused(cancelling: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "EXPECTED", {**EXPECTED, "rmsnorm/float32": "0" * 12})
    with pytest.raises(ConfigError, match=r"the reference kernels give other bits .* in rmsnorm/float32: .*--kernels"):
        Engine(cancelling["llama"], kernels="reference", num_blocks=8)


def test_an_engine_reports_its_fingerprint(cancelling: dict[str, str]) -> None:
    with Engine(cancelling["llama"], kernels="reference", num_blocks=8, k_shards=2, head_dtype="float32") as engine:
        assert engine.info.fingerprint == numerics_fingerprint(None, 2, "float32") == devices.check_build("reference", 2, "float32")
