"""An fp8 cache holds twice the tokens, and what it stores of a token never depends on its step."""

import dataclasses
from pathlib import Path

import pytest
import torch

from kernels.checks import Scales
from plan_driver import PlanDriver, Sequence
from tiny_families import write_family
from tiny_llama import KV_HEADS, VOCAB, write_tiny_llama
from worker_svc.bench_kv_quality import Comparison, Question
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.operations import Operations
from worker_svc.model.torch_operations import TorchOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.kv_form import KvForm, choose_kv_form
from worker_svc.runtime.memory_budget import startup_lines
from worker_svc.runtime.model_runner import ModelRunner
from worker_svc.runtime.plain_sequences import PlainSequences
from worker_svc.runtime.start_up import RunnerLimits, make_runner

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PROMPT = [(place * 37 + 11) % VOCAB for place in range(50)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[TorchOperations, NativeOperations])
def loaded(directory: Path, request: pytest.FixtureRequest) -> LoadedModel:
    operations: Operations = request.param()
    return load_model(directory, torch.float32, CPU, operations)


def new_runner(loaded: LoadedModel, form: KvForm | None) -> ModelRunner:
    limits = RunnerLimits(
        block_size=4, max_num_seqs=4, max_model_len=80, num_gpu_blocks_override=40
    )
    return make_runner(loaded, limits, form)[0]


def stored(runner: ModelRunner, sequence: Sequence) -> torch.Tensor:
    """Return the sequence's keys and values as they lie in the cache, as numbers."""
    blocks = torch.tensor(sequence.blocks)
    tensors = [cache[blocks] for layer in runner.kv_cache.layers for cache in layer[:2]]
    return (
        torch.stack(tensors)
        .float()
        .view(len(tensors), -1, tensors[0][0][0].numel())[:, : len(PROMPT)]
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_stored_does_not_depend_on_chunks(loaded: LoadedModel, dtype: torch.dtype) -> None:
    form = choose_kv_form(loaded, dtype)
    whole, cut = new_runner(loaded, form), new_runner(loaded, form)
    at_once, in_chunks = Sequence(PROMPT), Sequence(PROMPT)
    PlanDriver(whole).step({at_once: 50})
    driver = PlanDriver(cut)
    for count in (7, 1, 16, 26):
        driver.step({in_chunks: count})
    assert at_once.output == in_chunks.output
    one, other = stored(whole, at_once), stored(cut, in_chunks)
    # Products of other sizes differ in their last bits; one such may fall to the other side.
    assert (one != other).float().mean() < 1e-3
    torch.testing.assert_close(one, other, rtol=0.3, atol=1e-3)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_logits_of_fp8_are_near_those_of_the_run_dtype(
    loaded: LoadedModel, dtype: torch.dtype
) -> None:
    outputs = []
    for form in (None, choose_kv_form(loaded, dtype)):
        runner = new_runner(loaded, form)
        outputs.append(PlanDriver(runner).generate(Sequence(PROMPT), 6))
    assert outputs[0][0] == outputs[1][0]


def test_calibrated_scales_are_powers_of_two_that_leave_room(loaded: LoadedModel) -> None:
    form = choose_kv_form(loaded, E4M3)
    again = choose_kv_form(loaded, E4M3)
    assert form.scales is not None
    assert form.scales_name == again.scales_name
    plain = new_runner(loaded, None)
    sequence = Sequence(PROMPT)
    PlanDriver(plain).step({sequence: 50})
    for scales, layer in zip(form.scales, plain.kv_cache.layers, strict=True):
        for scale, cache in ((scales.k, layer.k), (scales.v, layer.v)):
            assert scale.shape == (KV_HEADS,)
            assert torch.equal(torch.frexp(scale)[0], torch.full((KV_HEADS,), 0.5))
            peak = cache[sequence.blocks].abs().amax(dim=(0, 1, 3))
            # Other tokens than those measured, so the room is not exactly two.
            assert (peak * 1.5 < scale * 448).all()
            assert (peak * 12 > scale * 448).all()


def test_scales_of_a_checkpoint_go_before_measured_ones(loaded: LoadedModel) -> None:
    ones = Scales(torch.ones(KV_HEADS), torch.ones(KV_HEADS))
    with_scales = dataclasses.replace(loaded, kv_scales=(ones, ones))
    assert choose_kv_form(with_scales, E4M3).scales == (ones, ones)
    assert choose_kv_form(with_scales, E5M2).scales is None
    assert choose_kv_form(with_scales, torch.float32).scales is None


def test_scales_that_are_missing_are_1_if_none_shall_be_measured(loaded: LoadedModel) -> None:
    form = choose_kv_form(loaded, E4M3, measures=False)
    assert (form.lacks_scales, form.origin) == (True, "scales of 1")
    assert form.scales is not None
    assert all(one.k.eq(1).all() and one.v.eq(1).all() for one in form.scales)
    assert not choose_kv_form(loaded, E5M2, measures=False).lacks_scales
    ones = Scales(torch.ones(KV_HEADS), torch.ones(KV_HEADS))
    brought = dataclasses.replace(loaded, kv_scales=(ones, ones))
    assert not choose_kv_form(brought, E4M3, measures=False).lacks_scales


def test_a_scale_is_used_for_storing_and_for_reading(loaded: LoadedModel) -> None:
    """Scales that clamp everything change the output: they are not ignored on both sides."""
    tiny = Scales(torch.full((KV_HEADS,), 1e-5), torch.full((KV_HEADS,), 1e-5))
    sequence = Sequence(PROMPT)
    runner = new_runner(loaded, KvForm(E4M3, (tiny, tiny), "by hand"))
    PlanDriver(runner).step({sequence: 50})
    held = stored(runner, sequence).abs()
    assert (held == 448).float().mean() > 0.9


def test_the_same_memory_holds_more_blocks_and_the_log_says_how_many(loaded: LoadedModel) -> None:
    limits = RunnerLimits(block_size=4, max_model_len=64, kv_cache_memory_bytes=1 << 20)
    plain = make_runner(loaded, limits)[1]
    form = choose_kv_form(loaded, E4M3)
    report = make_runner(loaded, limits, form)[1]
    assert report.num_blocks == 4 * plain.num_blocks  # a byte instead of float32's four
    assert startup_lines(report)[-1] == (
        f"KV cache in float8_e4m3fn, static scales per head, calibrated {form.scales_name}: 4.00x "
        f"the blocks of float32 in the same memory ({report.num_blocks} instead of "
        f"{plain.num_blocks})"
    )
    assert len(startup_lines(plain)) == 3


@pytest.mark.parametrize("name", ["gemma3", "mistral", "mixtral"])
def test_layers_of_several_kv_groups_have_scales_of_their_own(name: str, tmp_path: Path) -> None:
    """Groups share tensors: what calibration reads of a layer must not be another group's."""
    write_family(name, tmp_path)
    loaded = load_model(tmp_path, torch.float32, CPU)
    form = choose_kv_form(loaded, E4M3)
    assert form.scales is not None
    for scales, layer in zip(form.scales, range(loaded.model.config.num_layers), strict=True):
        alone = PlainSequences(loaded.model, [40], torch.float32)
        alone.run([[token % 60 for token in range(40)]])
        for scale, values in zip((scales.k, scales.v), alone.stored(layer), strict=True):
            assert (values.abs().amax(dim=(0, 1, 3)) < scale * 448).all()
    plain = Comparison(loaded)
    prompts = [[token % 60 for token in PROMPT]]
    plain.answer(Question(kv_dtype="auto", prompts=prompts, output_len=4))
    told = plain.answer(Question(kv_dtype="fp8", prompts=prompts, output_len=4))
    assert 0 < told["logit_error_mean"] < 0.5 * told["logit_std"]
