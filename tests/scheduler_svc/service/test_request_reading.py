"""What a request says is taken over exactly, and what it may not say is refused by name."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from front_end_loopback import EOS, MAX_MODEL_LEN, VOCAB_SIZE, facts, front_end
from pagemill.v1.generation_pb2 import (
    EARLY_STOPPING_NEVER,
    BeamSearch,
    Guide,
    Sampling,
    Stopping,
    TokenIds,
)
from pagemill.v1.inference_pb2 import (
    CacheOptions,
    Chat,
    ChatMessage,
    GenerateRequest,
    OutputOptions,
)
from scheduler_svc.core.beam_options import BeamOptions, EarlyStopping
from scheduler_svc.core.errors import InvalidRequestError, NotServedError, UnknownModelError
from scheduler_svc.core.reports import Reports
from scheduler_svc.core.request import Sampling as CoreSampling
from scheduler_svc.errors import ConfigError
from scheduler_svc.service.engine_door import Submission
from scheduler_svc.service.front_end import FrontEnd
from scheduler_svc.service.request_reading import read_request
from scheduler_svc.service.text.model_facts import SamplingDefaults

PROMPT = TokenIds(ids=[104, 105])
NAN, INFINITY = math.nan, math.inf


FRONT = front_end()


async def read(request: GenerateRequest, front: FrontEnd = FRONT) -> Submission:
    return await read_request(request, front, arrival_ns=1, deadline_ns=None, traceparent="")


def asking(**fields: object) -> GenerateRequest:
    """Return a request with a good prompt, if `fields` bring no other."""
    prompts = {"text", "token_ids", "chat"}
    prompt = {} if prompts & fields.keys() else {"token_ids": PROMPT}
    return GenerateRequest(**prompt, **fields)  # type: ignore[arg-type]  # the fields are the test's


def with_sampling(**fields: object) -> GenerateRequest:
    return asking(sampling=Sampling(**fields))  # type: ignore[arg-type]  # the fields are the test's


def with_stopping(**fields: object) -> GenerateRequest:
    return asking(stopping=Stopping(**fields))  # type: ignore[arg-type]  # the fields are the test's


def with_output(**fields: object) -> GenerateRequest:
    return asking(output=OutputOptions(**fields))  # type: ignore[arg-type]  # the fields are the test's


def with_beams(**fields: object) -> GenerateRequest:
    return asking(beam=BeamSearch(**fields))  # type: ignore[arg-type]  # the fields are the test's


def with_chat(*messages: ChatMessage, **fields: object) -> GenerateRequest:
    return asking(chat=Chat(messages=messages, **fields))  # type: ignore[arg-type]  # the fields are the test's


USER = ChatMessage(role="user", content="hi")

# Each with the field that the refusal names, and words of its sentence.
INVALID = [
    (GenerateRequest(), "prompt", "missing"),
    (asking(token_ids=TokenIds()), "token_ids", "at least 1 token"),
    (asking(text=""), "text", "at least 1 token"),
    (with_chat(), "chat", "at least 1"),
    (asking(token_ids=TokenIds(ids=[-1])), "token_ids", "the id -1, must be in [0, 271]"),
    (asking(token_ids=TokenIds(ids=[VOCAB_SIZE])), "token_ids", "the id 272"),
    (asking(token_ids=TokenIds(ids=[2**31 - 1])), "token_ids", "the id 2147483647"),
    (
        asking(token_ids=TokenIds(ids=[1] * 64)),
        "token_ids",
        "has 64 tokens, must have fewer than 64",
    ),
    (asking(text="x" * 64), "text", "has 64 tokens, must have fewer than 64"),
    (asking(text="x" * 1000), "text", "tokens, must have fewer than 64"),
    (asking(text="x" * 10_000_000), "text", "at least"),
    (with_chat(ChatMessage(role="user", content="x" * 64)), "chat", "must have fewer than 64"),
    (with_chat(ChatMessage(role="user", content="x" * 10_000_000)), "chat", "at least"),
    (with_chat(ChatMessage(content="hi")), "chat.messages[0].role", "''"),
    (with_chat(*[ChatMessage(role="w")] * 4097), "chat.messages", "must have at most 4096"),
    (with_chat(USER, tools_json=["{}"] * 1025), "chat.tools_json", "must have at most 1024"),
    (with_chat(USER, ChatMessage(role="im_end")), "chat.messages[1].role", "'im_end'"),
    (with_chat(ChatMessage(role="a|>b")), "chat.messages[0].role", "'a|>b'"),
    (
        with_chat(ChatMessage(role="user", extra_json="[1]")),
        "chat.messages[0].extra_json",
        "object",
    ),
    (
        with_chat(ChatMessage(role="user", extra_json="{")),
        "chat.messages[0].extra_json",
        "not JSON",
    ),
    (with_chat(USER, tools_json=["{}", "3"]), "chat.tools_json[1]", "object"),
    (with_chat(USER, template_arguments_json="x"), "chat.template_arguments_json", "not JSON"),
    (asking(request_id="a\nb"), "request_id", r"'a\nb', must be printable"),
    (asking(request_id="x" * 257), "request_id", "has 257 bytes, must have at most 256"),
    (asking(request_id="ä" * 129), "request_id", "has 258 bytes"),
    (asking(request_id="x" * 65_536), "request_id", "has 65536 bytes"),
    (asking(cache=CacheOptions(salt="x" * 257)), "cache.salt", "has 257 bytes"),
    (with_sampling(temperature=-1), "sampling.temperature", "is -1.0, must be in [0, 2]"),
    (with_sampling(temperature=NAN), "sampling.temperature", "nan"),
    (with_sampling(temperature=INFINITY), "sampling.temperature", "inf"),
    (with_sampling(top_p=0), "sampling.top_p", "is 0.0, must be in (0, 1]"),
    (with_sampling(top_p=1.5), "sampling.top_p", "1.5"),
    (with_sampling(top_p=NAN), "sampling.top_p", "nan"),
    (with_sampling(top_k=-5), "sampling.top_k", "is -5, must be in [-1, ∞)"),
    (with_sampling(min_p=2), "sampling.min_p", "2.0"),
    (with_sampling(n=10**9), "sampling.n", "1000000000"),
    (with_sampling(n=9), "sampling.n", "is 9, must be at most 8, the most sequences"),
    (with_sampling(n=0), "sampling.n", "is 0, must be at least 1"),
    (with_sampling(presence_penalty=3), "sampling.presence_penalty", "3.0"),
    (with_sampling(frequency_penalty=-3), "sampling.frequency_penalty", "-3.0"),
    (with_sampling(repetition_penalty=0), "sampling.repetition_penalty", "in [1e-30, 1e+30]"),
    (with_sampling(repetition_penalty=1e-40), "sampling.repetition_penalty", "is 1e-40, must"),
    (with_sampling(repetition_penalty=1e300), "sampling.repetition_penalty", "is 1e+300, must"),
    (with_sampling(repetition_penalty=INFINITY), "sampling.repetition_penalty", "inf"),
    (with_sampling(logit_bias={272: 1}), "sampling.logit_bias", "the id 272"),
    (with_sampling(logit_bias={-1: 1}), "sampling.logit_bias", "the id -1"),
    (with_sampling(logit_bias={5: NAN}), "sampling.logit_bias[5]", "nan"),
    (with_sampling(logit_bias={5: INFINITY}), "sampling.logit_bias[5]", "inf"),
    (with_sampling(logit_bias=dict.fromkeys(range(2000), 1.0)), "sampling.logit_bias", "2000"),
    (with_sampling(allowed_token_ids=[1] * 273), "sampling.allowed_token_ids", "has 273 ids"),
    (with_sampling(allowed_token_ids=[300]), "sampling.allowed_token_ids", "the id 300"),
    (with_sampling(bad_words=["a", ""]), "sampling.bad_words", "[1] is empty"),
    (asking(tenant="x" * 257), "tenant", "has 257 bytes, must have at most 256"),
    (asking(tenant="a\nb"), "tenant", "must be printable text"),
    (with_stopping(max_tokens=0), "stopping.max_tokens", "is 0, must be in [1, ∞)"),
    (with_stopping(max_tokens=63), "stopping.max_tokens", "is 63, must be at most 62"),
    (with_stopping(max_tokens=2**32 - 1), "stopping.max_tokens", "must be at most 62"),
    (with_stopping(max_tokens=2, min_tokens=3), "stopping.min_tokens", "is 3, must be in [0, 2]"),
    (with_stopping(stop=["x", ""]), "stopping.stop", "[1] is empty"),
    (with_stopping(stop=["x"] * 65), "stopping.stop", "has 65 entries, must have at most 64"),
    (with_stopping(stop=["x"] * 100_000), "stopping.stop", "100000"),
    (with_stopping(stop=["x" * 4097]), "stopping.stop", "has 4097 bytes, must have at most 4096"),
    (with_stopping(stop=["x" * 10_000_000]), "stopping.stop", "10000000"),
    (with_stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids", "has 65 ids"),
    (
        with_stopping(stop_token_ids=[999_999], min_tokens=1),
        "stopping.stop_token_ids",
        "the id 999999",
    ),
    (with_output(logprobs=300), "output.logprobs", "is 300, must be in [0, 20]"),
    (with_output(prompt_logprobs=10**6), "output.prompt_logprobs", "1000000"),
    (with_output(min_interval_s=-1), "output.min_interval_s", "-1"),
    (with_output(min_interval_s=NAN), "output.min_interval_s", "nan"),
    (with_output(min_interval_s=61), "output.min_interval_s", "must be in [0, 60]"),
    (with_beams(width=1), "beam.width", "is 1, must be at least 2"),
    (with_beams(width=9), "beam.width", "is 9, must be at most 8, the most sequences"),
    (with_beams(width=10**6), "beam.width", "1000000"),
    (with_beams(num_returned=1), "beam.width", "is 0, must be at least 2"),
    (with_beams(width=2, num_returned=3), "beam.num_returned", "is 3, must be in [0, 2]"),
    (with_beams(width=2, length_penalty=NAN), "beam.length_penalty", "(-∞, ∞)"),
    (with_beams(width=2, early_stopping=4), "beam.early_stopping", "is 4, must be in [0, 3]"),
    *(
        (asking(beam=BeamSearch(width=2), sampling=sampling), field, "no meaning in beam search")
        for sampling, field in (
            (Sampling(n=2), "sampling.n"),
            (Sampling(temperature=0.5), "sampling.temperature"),
            (Sampling(top_k=1), "sampling.top_k"),
            (Sampling(top_p=0.9), "sampling.top_p"),
            (Sampling(min_p=0.1), "sampling.min_p"),
        )
    ),
    (
        asking(beam=BeamSearch(width=2), stopping=Stopping(stop=["x"])),
        "stopping.stop",
        "no meaning in beam search",
    ),
    (with_stopping(min_tokens=63), "stopping.min_tokens", "is 63, must be at most 62"),
    (with_stopping(min_tokens=2**32 - 1), "stopping.min_tokens", "must be at most 62"),
    (with_output(logprobs=21), "output.logprobs", "is 21, must be in [0, 20]"),
    (with_output(prompt_logprobs=2**31), "output.prompt_logprobs", "must be in [0, 20]"),
    (
        asking(cache=CacheOptions(read_cache=True), output=OutputOptions(prompt_logprobs=0)),
        "cache.read_cache",
        "must be false or unset",
    ),
    (
        asking(cache=CacheOptions(read_cache=True), output=OutputOptions(echo=True, logprobs=0)),
        "cache.read_cache",
        "must be false or unset",
    ),
    (with_sampling(bad_words=["x" * 4097] * 2), "sampling.bad_words", "must have at most 8192"),
]


@pytest.mark.parametrize(("request_", "field", "words"), INVALID)
async def test_a_bad_value_is_refused_with_its_field_and_bound(
    request_: GenerateRequest, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await read(request_)
    assert refused.value.field == field
    assert words in str(refused.value)
    assert len(str(refused.value)) < 600


def beams_and(**fields: object) -> GenerateRequest:
    return asking(beam=BeamSearch(width=2), **fields)


NOT_SERVED = [
    (asking(guide=Guide(regex="a+")), "guide"),
    (beams_and(sampling=Sampling(presence_penalty=1)), "sampling.presence_penalty"),
    (beams_and(sampling=Sampling(frequency_penalty=-1)), "sampling.frequency_penalty"),
    (beams_and(sampling=Sampling(repetition_penalty=1.1)), "sampling.repetition_penalty"),
    (beams_and(sampling=Sampling(logit_bias={5: 1.0})), "sampling.logit_bias"),
    (beams_and(sampling=Sampling(allowed_token_ids=[5])), "sampling.allowed_token_ids"),
    (beams_and(sampling=Sampling(bad_words=["x"])), "sampling.bad_words"),
    (beams_and(stopping=Stopping(min_tokens=1)), "stopping.min_tokens"),
    (beams_and(output=OutputOptions(logprobs=0)), "output.logprobs"),
]


@pytest.mark.parametrize(("request_", "field"), NOT_SERVED, ids=[name for _, name in NOT_SERVED])
async def test_a_field_of_later_versions_is_refused_by_name(
    request_: GenerateRequest, field: str
) -> None:
    with pytest.raises(NotServedError, match=field) as refused:
        await read(request_)
    assert refused.value.field == field


async def test_neutral_values_mean_what_unset_ones_do() -> None:
    neutral = with_sampling(
        n=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_k=-1, seed=3
    )
    assert (await read(neutral)).sampling == (await read(with_sampling(seed=3))).sampling
    assert (await read(with_sampling(n=1))).token_ids == array("i", [104, 105])


async def test_rules_are_taken_over_as_ids() -> None:
    request = with_sampling(
        presence_penalty=0.5,
        frequency_penalty=-2,
        repetition_penalty=1.25,
        logit_bias={9: -100, 5: 1.5},
        allowed_token_ids=[7, 5, 7],
        bad_words=["hi", " x"],
        seed=1,
    )
    assert (await read(request)).sampling == CoreSampling(
        temperature=1.0,
        seed=1,
        presence_penalty=0.5,
        frequency_penalty=-2,
        repetition_penalty=1.25,
        logit_bias=((5, 1.5), (9, -100)),
        allowed_token_ids=(5, 7),
        # At the start of a text, and behind a space.
        bad_words=((104, 105), (32, 104, 105), (32, 120)),
    )


async def test_a_models_repetition_penalty_is_taken_where_the_request_has_none() -> None:
    front = front_end(facts(sampling=SamplingDefaults(repetition_penalty=1.1)))
    assert (await read(asking(), front)).sampling.repetition_penalty == 1.1
    own = with_sampling(repetition_penalty=1)
    assert (await read(own, front)).sampling.repetition_penalty == 1
    assert (await read(with_beams(width=2), front)).sampling.repetition_penalty == 1
    with pytest.raises(ConfigError, match="repetition_penalty is 0"):
        front_end(facts(sampling=SamplingDefaults(repetition_penalty=0)))


@pytest.mark.parametrize(
    ("output", "reports"),
    [
        (OutputOptions(), Reports()),
        (OutputOptions(logprobs=0), Reports(logprobs=0)),
        (OutputOptions(prompt_logprobs=2), Reports(prompt_logprobs=2)),
        (OutputOptions(echo=True), Reports()),
        (OutputOptions(echo=True, logprobs=3), Reports(logprobs=3, prompt_logprobs=3)),
        (
            OutputOptions(echo=True, logprobs=1, prompt_logprobs=2),
            Reports(logprobs=1, prompt_logprobs=2),
        ),
    ],
)
async def test_who_wants_the_prompt_told_reads_no_cache(
    output: OutputOptions, reports: Reports
) -> None:
    submission = await read(asking(output=output))
    assert submission.reports == reports
    assert submission.read_cache is (reports.prompt_logprobs is None)


async def test_stops_that_hold_back_leave_a_token_to_draw() -> None:
    allowed = Sampling(allowed_token_ids=[EOS, 7])
    early = Stopping(min_tokens=2)
    assert (await read(asking(sampling=allowed, stopping=early))).min_output_tokens == 2
    only = Sampling(allowed_token_ids=[EOS])
    assert (await read(asking(sampling=only))).sampling.allowed_token_ids == (EOS,)
    own = Stopping(min_tokens=2, stop_token_ids=[7])
    for sampling, stopping in ((only, early), (allowed, own)):
        with pytest.raises(InvalidRequestError, match="one must be left") as refused:
            await read(asking(sampling=sampling, stopping=stopping))
        assert refused.value.field == "sampling.allowed_token_ids"


async def test_an_answer_that_tells_too_much_of_its_prompt_is_refused() -> None:
    front = front_end(max_model_len=2**20)
    prompt = TokenIds(ids=[1] * 50_000)
    small = OutputOptions(prompt_logprobs=19)
    assert (await read(GenerateRequest(token_ids=prompt, output=small), front)).token_ids
    for output, sampling in (
        (OutputOptions(prompt_logprobs=20), Sampling()),
        (OutputOptions(echo=True, logprobs=1), Sampling(n=7)),
    ):
        with pytest.raises(InvalidRequestError, match="must be at most 1048576"):
            await read(GenerateRequest(token_ids=prompt, output=output, sampling=sampling), front)


async def test_the_tenant_is_taken_as_it_is() -> None:
    assert (await read(asking())).tenant == ""
    assert (await read(asking(tenant="Ä, Ltd. = 1"))).tenant == "Ä, Ltd. = 1"


@pytest.mark.parametrize(("n", "count"), [(None, 1), (1, 1), (8, 8)])
async def test_a_request_says_how_many_sequences_it_wants(n: int | None, count: int) -> None:
    submission = await read(asking() if n is None else with_sampling(n=n))
    assert (submission.num_sequences, submission.num_outputs) == (count, count)
    assert submission.beam is None


async def test_a_beam_search_is_taken_over_with_its_defaults() -> None:
    plain = await read(with_beams(width=3))
    assert plain.beam == BeamOptions(
        3, length_penalty=1.0, early_stopping=EarlyStopping.NO, num_returned=1
    )
    assert (plain.num_sequences, plain.num_outputs) == (1, 1)
    full = await read(
        with_beams(
            width=8, length_penalty=-0.5, early_stopping=EARLY_STOPPING_NEVER, num_returned=8
        )
    )
    assert full.beam == BeamOptions(8, -0.5, EarlyStopping.NEVER, 8)
    assert full.num_outputs == 8


async def test_beams_do_not_draw_whatever_the_model_recommends() -> None:
    front = front_end(facts(sampling=SamplingDefaults(temperature=0.6, top_k=50)))
    neutral = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=5)
    for sampling in (neutral, Sampling(temperature=0, seed=5)):
        submission = await read(asking(beam=BeamSearch(width=2), sampling=sampling), front)
        assert submission.sampling == CoreSampling(temperature=0.0, seed=5)


async def test_only_served_names_are_models() -> None:
    for name in ("", "toy", "toy-alias"):
        assert (await read(asking(model=name))).token_ids
    with pytest.raises(UnknownModelError, match="'gpt' is not served, only toy, toy-alias"):
        await read(asking(model="gpt"))
    with pytest.raises(UnknownModelError) as refused:
        await read(asking(model="x\n" * 10_000))
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


async def test_what_a_request_leaves_open_is_filled_in() -> None:
    submission = await read(asking())
    assert submission.request_id
    assert submission.request_id != (await read(asking())).request_id
    assert submission.max_output_tokens is None
    assert submission.eos_token_ids == facts().eos_token_ids
    assert submission.read_cache
    assert submission.salt == b""
    assert (submission.sampling.temperature, submission.sampling.top_k) == (1.0, 0)
    assert (submission.sampling.top_p, submission.sampling.min_p) == (1.0, 0.0)


async def test_seeds_are_drawn_anew_if_unset_and_taken_over_if_zero() -> None:
    drawn = {(await read(asking())).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert (await read(with_sampling(seed=0))).sampling.seed == 0
    assert (await read(with_sampling(seed=2**64 - 1))).sampling.seed == 2**64 - 1


async def test_the_models_defaults_fill_unset_fields_only() -> None:
    recommended = SamplingDefaults(temperature=0.6, top_k=50, top_p=0.9, min_p=0.1)
    front = front_end(facts(sampling=recommended))
    sampling = (await read(asking(), front)).sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 50)
    assert (sampling.top_p, sampling.min_p) == (0.9, 0.1)
    sampling = (await read(with_sampling(temperature=0, top_k=0, min_p=0), front)).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)
    assert (sampling.top_p, sampling.min_p) == (0.9, 0.0)


def test_a_models_default_out_of_bounds_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match=r"top_p is 0, must be in \(0, 1\]"):
        front_end(facts(sampling=SamplingDefaults(top_p=0)))


@pytest.mark.parametrize("temperature", [0.0, 1e-10, 1e-6, 9.9e-6])
async def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert (await read(with_sampling(temperature=temperature))).sampling.temperature == 0


async def test_the_prompt_with_room_for_one_token_is_the_longest() -> None:
    longest = asking(token_ids=TokenIds(ids=[1] * (MAX_MODEL_LEN - 1)))
    assert len((await read(longest)).token_ids) == MAX_MODEL_LEN - 1
    exact = with_stopping(max_tokens=62)
    assert (await read(exact)).max_output_tokens == 62


async def test_ignoring_eos_leaves_only_the_requests_own_stop_ids() -> None:
    submission = await read(with_stopping(ignore_eos=True, stop_token_ids=[EOS, 7]))
    assert submission.eos_token_ids == frozenset()
    assert submission.stop_token_ids == {EOS, 7}


async def test_users_cannot_write_special_tokens_in_a_chat() -> None:
    said = ChatMessage(role="user", content="<|im_end|>")
    ids = (await read(with_chat(said))).token_ids.tolist()
    assert ids.count(258) == 1
    assert bytes(b for b in ids if b < 256) == b"user <|im_end|>assistant "


@pytest.mark.parametrize("depth", [600, 100_000])
async def test_json_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    nested = '{"a":' + "[" * depth + "]" * depth + "}"
    with pytest.raises(InvalidRequestError, match="nested too deeply") as refused:
        await read(with_chat(USER, tools_json=["{}", nested]), front_end(max_model_len=10**6))
    assert refused.value.field == "chat.tools_json[1]"


async def test_the_last_message_can_be_continued() -> None:
    begun = ChatMessage(role="assistant", content="Well, ")
    request = with_chat(USER, begun, continue_last_message=True)
    ids = (await read(request)).token_ids.tolist()
    assert bytes(ids[ids.index(258) + 2 :]) == b"assistant Well, "


numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(
    temperature=numbers,
    top_k=st.integers(-(2**31), 2**31 - 1),
    top_p=numbers,
    min_p=numbers,
    seed=st.integers(0, 2**64 - 1),
)
async def test_sampling_is_taken_over_or_refused(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    good = 0 <= temperature <= 2 and top_k >= -1 and 0 < top_p <= 1 and 0 <= min_p <= 1
    request = with_sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if not good:
        with pytest.raises(InvalidRequestError):
            await read(request)
        return
    sampling = (await read(request)).sampling
    assert sampling.temperature == (temperature if temperature >= 1e-5 else 0)
    assert sampling.top_k == max(top_k, 0)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (top_p, min_p, seed)


@given(ids=st.lists(st.integers(-3, VOCAB_SIZE + 3), max_size=80), max_tokens=st.integers(0, 70))
async def test_a_prompt_is_taken_over_or_refused(ids: list[int], max_tokens: int) -> None:
    fits = 1 <= len(ids) < MAX_MODEL_LEN and 1 <= max_tokens <= MAX_MODEL_LEN - len(ids)
    request = asking(token_ids=TokenIds(ids=ids), stopping=Stopping(max_tokens=max_tokens))
    if not (fits and all(0 <= id_ < VOCAB_SIZE for id_ in ids)):
        with pytest.raises(InvalidRequestError):
            await read(request)
        return
    submission = await read(request)
    assert submission.token_ids.tolist() == ids
    assert submission.max_output_tokens == max_tokens
