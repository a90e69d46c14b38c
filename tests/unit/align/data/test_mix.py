from __future__ import annotations

from pathlib import Path

import pytest

from forerun.align.config import DataConfig
from forerun.align.samples import Sample, mix
from forerun.errors import InvalidRequest


def shares(**changes: float) -> dict[str, float]:
    return DataConfig(prompts=Path("p"), **changes).shares


def samples(source: str, count: int, length: int) -> list[Sample]:
    return [
        Sample(
            prompt_hash=f"{number:016x}",
            token_ids=(number,) * (length + 1),
            spans=((1, length + 1),),
            source=source,
        )
        for number in range(count)
    ]


def learned(chosen: list[Sample]) -> dict[str, int]:
    return {
        source: sum(s.num_learned for s in chosen if s.source == source)
        for source in {s.source for s in chosen}
    }


def test_the_target_writes_what_is_left():
    assert shares() == {"target": 1.0}
    assert shares(fixed_share=0.25) == {"fixed": 0.25, "target": 0.75}
    assert shares(fixed_share=1.0) == {"fixed": 1.0}


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(InvalidRequest, match="fixed_share is"):
        shares(fixed_share=share)


def test_the_scarcest_source_decides_how_many():
    everything = samples("target", 100, 10) + samples("fixed", 10, 20)
    chosen = mix(everything, {"target": 0.5, "fixed": 0.5}, seed=0)
    assert learned(chosen) == {"target": 200, "fixed": 200}


def test_one_source_alone_is_taken_whole():
    everything = samples("target", 9, 7) + samples("fixed", 3, 7)
    assert len(mix(everything, {"target": 1.0}, seed=0)) == 9


def test_selections_are_by_the_seed():
    everything = samples("target", 100, 10) + samples("fixed", 10, 10)
    shares = {"target": 0.5, "fixed": 0.5}

    def chosen(seed: int) -> list[tuple[int, ...]]:
        return [s.token_ids for s in mix(everything, shares, seed=seed)]

    assert chosen(0) == chosen(0)
    assert set(chosen(0)) != set(chosen(1))


def test_a_share_of_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="50% of the tokens are to come from source 'fixed'"):
        mix(samples("target", 3, 4), {"target": 0.5, "fixed": 0.5}, seed=0)
