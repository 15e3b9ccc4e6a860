"""Ranks measure fp8 scales together: each has its heads' part of what one worker would measure."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.checks import Scales
from thread_ranks import on_all_ranks
from tiny_families import write_family
from tiny_llama import KV_HEADS, LAYERS, VOCAB, write_tiny_llama
from worker_svc.errors import ConfigError
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.shard import Extent
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.kv_form import KvForm, choose_kv_form
from worker_svc.runtime.plain_sequences import PlainSequences
from worker_svc.runtime.rank_scales import share_scales
from worker_svc.service.process_group import ProcessGroup

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
PROMPT = [(place * 37 + 11) % VOCAB for place in range(50)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def load(path: Path, ranks: OtherRanks | None = None) -> LoadedModel:
    return load_model(path, torch.float32, CPU, NativeOperations(), ranks)


def scales_of(form: KvForm) -> tuple[Scales, ...]:
    assert form.scales is not None
    return form.scales


def equal(one: tuple[Scales, ...], other: tuple[Scales, ...]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in zip(one, other, strict=True)
    )


def part(scales: tuple[Scales, ...], heads: range) -> tuple[Scales, ...]:
    mine = slice(heads.start, heads.stop)
    return tuple(Scales(one.k[mine], one.v[mine]) for one in scales)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_has_the_scales_that_one_worker_gives_its_heads(
    world_size: int, tiny: Path
) -> None:
    """Three and four ranks hold some of the two key/value heads twice."""
    alone = scales_of(choose_kv_form(load(tiny), E4M3))

    def run(group: ProcessGroup) -> tuple[tuple[Scales, ...], range]:
        loaded = load(tiny, group)
        return scales_of(choose_kv_form(loaded, E4M3)), loaded.kv_heads.mine

    for found, heads in on_all_ranks(world_size, run):
        assert equal(found, part(alone, heads))


def fp8_logits(loaded: LoadedModel) -> torch.Tensor:
    form = choose_kv_form(loaded, E4M3)
    sequences = PlainSequences(loaded.model, [len(PROMPT)], E4M3, form.scales)
    hidden = [sequences.run([PROMPT[:30]]), *(sequences.run([[token]]) for token in PROMPT[30:])]
    return loaded.model.logits(torch.cat(hidden))


def test_logits_of_two_ranks_with_fp8_are_near_those_of_one_worker_with_fp8(tiny: Path) -> None:
    """A stored value that falls to the other side of an edge is off by 1 in 16, and rare."""
    one_worker = load(tiny)
    alone = fp8_logits(one_worker)
    ranks = on_all_ranks(2, lambda group: fp8_logits(load(tiny, group)))[0]
    plain = PlainSequences(one_worker.model, [len(PROMPT)], torch.float32)
    exact = one_worker.model.logits(plain.run([PROMPT]))
    of_fp8, of_ranks = (alone - exact).abs().mean(), (ranks - alone).abs().mean()
    assert of_fp8 > 1e-3  # else nothing was stored in fp8
    assert of_ranks < of_fp8 / 10
    assert (ranks.argmax(-1) == alone.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_other_families_measure_together_as_well(name: str, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    alone = scales_of(choose_kv_form(load_model(tmp_path, torch.float32, CPU), E4M3))

    def run(group: ProcessGroup) -> tuple[tuple[Scales, ...], range]:
        loaded = load_model(tmp_path, torch.float32, CPU, TorchOperations(), group)
        return scales_of(choose_kv_form(loaded, E4M3)), loaded.kv_heads.mine

    for found, heads in on_all_ranks(2, run):
        assert equal(found, part(alone, heads))


def test_a_new_rank_takes_the_scales_by_which_another_stores_the_same_head(tiny: Path) -> None:
    """Ranks 0 and 1 share key/value head 0, ranks 2 and 3 head 1; rank 0 was there before."""

    def run(group: ProcessGroup) -> tuple[Scales, ...]:
        loaded = load(tiny, group)
        kept = None
        if group.shard.rank == 0:
            odd = Scales(torch.tensor([0.0625]), torch.tensor([0.125]))
            kept = KvForm(E4M3, (odd,) * LAYERS, "static scales per head, calibrated")
        return scales_of(choose_kv_form(loaded, E4M3, kept))

    first, second, third, fourth = on_all_ranks(4, run)
    assert [(one.k.tolist(), one.v.tolist()) for one in first] == [([0.0625], [0.125])] * LAYERS
    assert equal(first, second)
    assert equal(third, fourth)
    assert not equal(first, third)


def test_where_all_have_scales_nothing_is_measured(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(group: ProcessGroup) -> tuple[KvForm, KvForm]:
        loaded = load(tiny, group)
        form = choose_kv_form(loaded, E4M3)
        with monkeypatch.context() as patch:
            patch.setattr(loaded.model, "_layers", ())  # it could not run
            return form, choose_kv_form(loaded, E4M3, form)

    for before, after in on_all_ranks(2, run):
        assert after is before


def test_scales_are_1_on_every_rank_if_one_of_them_shall_not_measure(tiny: Path) -> None:
    def run(group: ProcessGroup) -> KvForm:
        measures = group.shard.rank == 0
        return choose_kv_form(load(tiny, group), E4M3, measures=measures)

    for form in on_all_ranks(2, run):
        assert form.lacks_scales
        assert all(torch.equal(s, torch.ones(1)) for one in scales_of(form) for s in (one.k, one.v))


def test_what_one_rank_cannot_store_is_refused_on_every_rank(tiny: Path, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path)
    tensors = load_file(path / "model.safetensors")
    # Of the head that the last rank has alone.
    tensors["model.layers.1.self_attn.v_proj.weight"][-1] = float("nan")
    save_file(tensors, path / "model.safetensors")

    def run(group: ProcessGroup) -> str:
        with pytest.raises(ConfigError) as refusal:
            choose_kv_form(load(path, group), E4M3)
        return str(refusal.value)

    for message in on_all_ranks(2, run):
        assert message.startswith("kv_cache_dtype: calibration failed, ")


def test_shared_scales_are_the_largest_measured_unless_one_is_kept() -> None:
    """Of 2 heads on 3 ranks: the first is held twice."""
    measured, kept = [1.0, 2.0, 8.0], [None, None, 4.0]
    heads = [range(1), range(1), range(1, 2)]

    def run(group: ProcessGroup) -> tuple[Scales, ...]:
        rank = group.shard.rank
        own, old = torch.tensor([measured[rank]]), kept[rank]
        old_scales = None if old is None else [Scales(torch.tensor([old]), torch.tensor([old]))]
        return share_scales([Scales(own, own)], old_scales, Extent(KV_HEADS, heads[rank]), group)

    for (found,) in on_all_ranks(3, run):
        assert found.k.tolist() == found.v.tolist() == [2.0, 4.0]
