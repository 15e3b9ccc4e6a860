"""Names of spans and attributes. OpenTelemetry's are still in development: they change here only.

Source: semantic-conventions for RPC (release candidate), semantic-conventions-genai
    (development), and `gen_ai.latency.*`, which vLLM and SGLang share.
"""

# Of a request.
GENERATE_SPAN = "pagemill.v1.Inference/Generate"
QUEUE_SPAN = "queue"
PREFILL_SPAN = "prefill"
DECODE_SPAN = "decode"
PREEMPTED_SPAN = "preempted"

RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
ERROR_TYPE = "error.type"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICES = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"  # noqa: S105  no password
END_TO_END = "gen_ai.latency.e2e"

REQUEST_BEAM_WIDTH = "pagemill.request.beam_width"
MISS_REASON = "pagemill.cache.miss_reason"
TENANT = "pagemill.tenant"
RECOMPUTED_TOKENS = "pagemill.recomputed_tokens"
PREEMPTIONS = "pagemill.preemptions"
FIRST_STEP_ID = "pagemill.first_step_id"
LAST_STEP_ID = "pagemill.last_step_id"

# Of a step.
STEP_SPAN = "step"
SCHEDULE_SPAN = "schedule"
ENCODE_SPAN = "encode"
WIRE_SPAN = "wire"
WORKER_WAIT_SPAN = "worker_wait"
EXECUTE_SPAN = "execute"
PREPARE_SPAN = "prepare"
FORWARD_SPAN = "forward"
SAMPLE_SPAN = "sample"
DECODE_RESULT_SPAN = "decode"
EMIT_SPAN = "emit"

STEP_ID = "pagemill.step.id"
STEP_EPOCH = "pagemill.step.epoch"
STEP_ROWS = "pagemill.step.rows"
STEP_TOKENS = "pagemill.step.tokens"
STEP_SAMPLED = "pagemill.step.sampled_tokens"
STEP_PREEMPTED = "pagemill.step.preempted"
STEP_RUNNING = "pagemill.step.running"
STEP_WAITING = "pagemill.step.waiting"
STEP_PLAN_BYTES = "pagemill.step.plan_bytes"
STEP_RESULT_BYTES = "pagemill.step.result_bytes"
STEP_TRACED_FOR = "pagemill.step.traced_for"
