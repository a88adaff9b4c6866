"""The engine for a GPU: Triton kernels, and CUDA graphs of steps."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import ConfigError, ModelError
from worker_proc.gpu.adapters import GPUAdapters
from worker_proc.gpu.graphs import (
    Capture,
    DecodeGraphs,
    DecodeInputs,
    GraphOutput,
    PromptGraphs,
    PromptInputs,
    PromptStep,
)
from worker_proc.gpu.kernels.adapters import StepAdapters
from worker_proc.gpu.kernels.experts import grouped_experts
from worker_proc.gpu.kernels.matmul import multiply
from worker_proc.gpu.kernels.sampling import mask_forbidden, sample_tokens
from worker_proc.gpu.ops import Hidden, PaddedHeads, TritonOps
from worker_proc.gpu.pages import (
    LONG_CONTEXT,
    LONG_SPLITS,
    AttentionMetadata,
    Pages,
    TritonAttention,
    query_blocks,
)
from worker_proc.gpu.products import Products, chooses, multiply_by_torch
from worker_proc.models.attention import Ints
from worker_proc.models.base import Model
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Attention
from worker_proc.models.transfer import send_all
from worker_proc.sampling.grammar import (
    Constrained,
    Mask,
    all_allowed,
    compute_in_parallel,
    masks_of,
)
from worker_proc.sampling.logits_processors import (
    RowLogits,
    apply_logits_processors,
    constrained,
)
from worker_proc.sampling.sampler import NO_SAMPLE
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import (
    NO_TOKENS,
    SampledTokens,
    row_logprobs,
    sampled_logprobs,
)
from worker_proc.step.pooling import OutputNorm
from worker_proc.step.slot_table import SlotTable

if TYPE_CHECKING:
    from worker_proc.adapters.change import Adapter, AdapterLimits
    from worker_proc.distributed.tp_group import TPGroup

PROGRESS_INTERVAL_S = 2.0


class TritonEngine(Engine):
    """A model on a GPU, with attention over its pages."""

    name = "triton"
    is_for_gpu = True
    stores_tokens = True
    supports_jump_forward = False  # with a row of several tokens a step is no decode graph
    max_draft_samples = 64  # so that the graphs of short steps with prompts hold them

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        graph_sizes: Sequence[int] = (),
        capture: Capture | None = None,
        ranks: "TPGroup | None" = None,
        prompt_sizes: Sequence[int] = (),
        flashinfer: bool = False,
        drafts: bool = False,
        adapters: "AdapterLimits | None" = None,
    ) -> None:
        """Allocate the pages.

        Args:
            model: the model, on the device.
            num_pages: size of the KV pool.
            page_size: tokens of a page.
            kv_dtype: of keys and values.
            device: the GPU.
            deterministic: a token's numbers are the same to the last bit, whatever else is in a
                step, and however a prompt is cut.
            graph_sizes: rows of the decode steps to capture, ascending.
            capture: captures a graph; None: none are.
            ranks: the processes with the other parts of the model.
            prompt_sizes: tokens of the steps with prompts to capture, ascending.
            flashinfer: prompts attend by FlashInfer, see flashinfer.py.
            drafts: tokens will be drafted: graphs of steps with prompts have room for
                `max_draft_samples` sampled tokens, even if fewer rows run.
            adapters: those that it takes; None: none.
        """
        self.model = model
        self.ranks = ranks
        self.output_norm, self.has_head = OutputNorm.of(model), model.has_head
        self._experts = grouped_experts(model)
        self._heads = PaddedHeads()
        self._pages = Pages(model.attention_shape, num_pages, page_size, kv_dtype, device)
        self._dtype = dtype = next(model.parameters()).dtype
        self._products = Products(
            device,
            multiply if deterministic else multiply_by_torch,
            not deterministic and chooses(device, dtype),
            may_begin_early=ranks is None,
        )
        self._attention = TritonAttention(self._pages, dtype, deterministic)
        if flashinfer:
            from worker_proc.gpu.flashinfer import FlashInferAttention

            self._attention = FlashInferAttention(self._pages, model, dtype)
            self.name = "flashinfer"
        self._graph_sizes, self._prompt_sizes = graph_sizes, prompt_sizes
        self._capture = capture
        if capture is not None:
            self.max_graph_tokens = max((*graph_sizes, *prompt_sizes), default=0)
        self._min_samples = self.max_draft_samples if drafts else 0
        self._adapters: GPUAdapters | None = None
        if adapters is not None:
            assert isinstance(model, Decoder)  # as is each model that has places for adapters
            self._adapters = GPUAdapters(model, adapters, dtype, device)
            self.supports_adapters = True
        self._logits_buffer: Tensor | None = None  # of all graphs, of which one runs at a time
        self._decode_graphs: DecodeGraphs | None = None
        self._adapted_graphs: DecodeGraphs | None = None  # of decode steps with adapters
        self._prompt_graphs: PromptGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(self, table: SlotTable) -> None:
        if table.device.type == "cuda":
            layers = [module for module in self.model.modules() if isinstance(module, Attention)]
            self._attention.check_writing(layers)
        self._products.choose(partial(self._compile, table))
        self._compile(table)
        if self._capture is None:
            return
        try:
            self._capture_all(table, self._capture)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the GPU's memory ran out as CUDA graphs were captured: start with a lower"
                " --mem-fraction-static, or with --disable-cuda-graph"
            ) from error

    def _capture_all(self, table: SlotTable, capture: Capture) -> None:
        is_context_long = table.context_length > LONG_CONTEXT
        max_samples = max(self._graph_sizes[-1], self._min_samples)
        self._logits_buffer = torch.empty(
            max_samples, PaddedHeads.size(self.model.vocab_size), dtype=self._dtype,
            device=table.device,
        )  # fmt: skip
        self.has_graphs = True

        def decode_graphs(what: str, max_adapters: int) -> DecodeGraphs:
            return DecodeGraphs(
                partial(self._decode, table),
                self._graph_sizes,
                lambda size: is_context_long and self._pages.num_splits(size, False) < LONG_SPLITS,
                table.device,
                capture,
                _progress_logger(what),
                max_adapters,
            )

        self._decode_graphs = decode_graphs("decode steps", 0)
        if self._adapters is not None:
            count = self._adapters.limits.max_adapters
            self._adapted_graphs = decode_graphs("decode steps with adapters", count)
        if self._prompt_sizes:
            self._prompt_graphs = PromptGraphs(
                partial(self._compute_prompts, table),
                self._prompt_sizes,
                self._graph_sizes[-1],
                max_samples,
                self._attention.max_queries,
                table.device,
                capture,
                _progress_logger("steps with prompts"),
            )

    def _compile(self, table: SlotTable) -> None:
        """Launch every kernel once on padding, so that none is compiled while requests wait."""
        metadata = self._attention.plan_all_kinds(table)
        for experts in self._experts.values():
            dtype = next(self.model.parameters()).dtype
            experts.compile_routing(dtype, table.device, self._adapters is not None)
        for adapted in (None, *(self._adapters.padding() if self._adapters else ())):
            ops = self._ops(metadata, adapted=adapted)
            logits = self.model.compute_logits(ops, self.model.forward(ops)).x
        self._sample(table, logits, metadata.slots, metadata.positions)
        # Logits that processors have changed are float32, and their rows lie close together.
        scores = logits.clone(memory_format=torch.contiguous_format).float()
        _mask(scores, np.zeros(1, dtype=np.int64), all_allowed(1, scores.shape[1]))
        self._sample(table, scores, metadata.slots, metadata.positions)

    def forward(self, inputs: StepInputs) -> Tensor:
        metadata = self._attention.plan_step(inputs)
        return self._forward(metadata, adapted=self._adapted(inputs.token_adapters))

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        computed = self._replay(inputs) if len(inputs.samples) else None
        if computed is not None:
            return self._sample_by_rules(inputs, computed)
        metadata, sampled = self._attention.plan_step(inputs), inputs.last_tokens
        tokens, samples = inputs.token_adapters, inputs.table.adapters_of(inputs.sampled_slots)
        hidden = self._forward(metadata, sampled, self._adapted(tokens), self._adapted(samples))
        return self.sample_rows(inputs, hidden)

    def sample_rows(self, inputs: StepInputs, hidden: Tensor) -> SampledTokens:
        if not len(inputs.samples):
            return SampledTokens(NO_TOKENS)
        logits = self.logits(hidden, inputs.table.adapters_of(inputs.sampled_slots))
        return self._sample_by_rules(inputs, GraphOutput(logits, self.sample_slots(logits, inputs)))

    def _sample_by_rules(self, inputs: StepInputs, computed: GraphOutput) -> SampledTokens:
        """Sample the rows again whose logits are changed by processors.

        A grammar may have to accept the last token of its slot first. The host waits for that token
        here, where the device is busy with this step.

        Args:
            inputs: the step, which is launched.
            computed: logits and tokens of all rows that sample.
        """
        table, token_ids = inputs.table, computed.token_ids
        if table.sampling.unprocessed[inputs.sampled_slots].all():
            return SampledTokens(token_ids, stored=True)
        if table.has_drafts:  # over which the step has written its samples
            table.write_drafts()
        rules = table.sampling.row_logits(inputs.sampled_slots)
        asked = row_logprobs(computed.logits, rules)
        changing = [row for row in rules if row.changes_logits]
        if changing:
            self._sample_again(inputs, computed, changing)
        logprobs = asked and sampled_logprobs(asked, token_ids, inputs.sampled_rows, table.copier)
        return SampledTokens(token_ids, logprobs, constrained(rules), not table.has_drafts)

    def _sample_again(
        self, inputs: StepInputs, computed: GraphOutput, rows: Sequence[RowLogits]
    ) -> None:
        """Sample rows from their changed logits, and write their tokens to those of the step."""
        table, numbers = inputs.table, np.array([row.row for row in rows])
        positions = inputs.sample_positions[numbers]
        slots, places, index = send_all(
            table.device, inputs.sampled_slots[numbers], positions - 1, numbers
        )
        alone = [row._replace(row=number) for number, row in enumerate(rows)]
        logits = computed.logits.index_select(0, index)
        scores = apply_logits_processors(logits, alone, positions, table.tokens, _mask_by_grammar)
        again = self._sample(table, scores, slots, places).clamp_(min=0)
        # What processors mask is no error of the model, nor does it hide one.
        before = computed.token_ids[index]
        computed.token_ids[index] = torch.where(before == NO_SAMPLE, before, again)

    def kv_parts(self) -> Sequence[Tensor]:
        return [part for layer in self._pages.layers for part in layer.unbind()]

    def kv_pools(self) -> Sequence[Tensor]:
        return [self._pages.pool.flatten(0, 1)]

    def pack_adapter(self, adapter: "Adapter") -> "Adapter":
        return adapter if self._adapters is None else self._adapters.pack(adapter)

    @torch.inference_mode()
    def upload_adapter(self, packed: "Adapter") -> "Adapter":
        return packed if self._adapters is None else self._adapters.upload(packed)

    @torch.inference_mode()
    def set_adapter(self, index: int, adapter: "Adapter | None") -> None:
        if self._adapters is None:
            raise ModelError(
                "the engine was made without adapters: start with --enable-lora, --lora-modules or"
                " --lora-dir"
            )
        self._adapters.set_adapter(index, adapter)

    def _adapted(self, adapters: Ints | None) -> StepAdapters | None:
        """Return the rows that have adapters, of `[rows]` indexes; None: no row has one."""
        if adapters is None:
            return None
        if self._adapters is None:
            raise ValueError(f"a row has the adapter {adapters.max()}, and the engine takes none")
        return self._adapters.of_rows(adapters)

    def _forward(
        self,
        metadata: AttentionMetadata,
        sampled: Tensor | None = None,
        adapted: StepAdapters | None = None,
        adapted_samples: StepAdapters | None = None,
    ) -> Tensor:
        """Compute hidden states `[tokens, hidden]`, or `[samples, hidden]` of sampled tokens."""
        are_fewer = sampled is not None and 0 < len(sampled) < len(metadata.slots)
        ops = self._ops(metadata, sampled if are_fewer else None, None, adapted, adapted_samples)
        hidden = self.model.forward(ops).settled()
        return hidden if sampled is None or are_fewer else hidden.index_select(0, sampled)

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        ops = self._ops(adapted=self._adapted(adapters))
        return self.model.compute_logits(ops, Hidden(hidden)).x

    def sample_slots(self, logits: Tensor, inputs: StepInputs) -> Tensor:
        table = inputs.table
        slots, positions = send_all(table.device, inputs.sampled_slots, inputs.sample_positions - 1)
        return self._sample(table, logits, slots, positions)

    def _sample(self, table: SlotTable, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return sample_tokens(logits, slots, positions, table.sampling, table.tokens)

    def _ops(
        self,
        metadata: AttentionMetadata | None = None,
        sampled: Tensor | None = None,
        logits_buffer: Tensor | None = None,
        adapted: StepAdapters | None = None,
        adapted_samples: StepAdapters | None = None,
    ) -> TritonOps:
        """Return the operations of a step; without metadata, those of `compute_logits`."""
        return TritonOps(
            self._pages, metadata, self._products, self.ranks, self._experts, self._heads,
            sampled, logits_buffer, adapted, adapted_samples,
        )  # fmt: skip

    def _replay(self, inputs: StepInputs) -> GraphOutput | None:
        """Run a step as a graph; None if no graph was captured for such a step."""
        layout, clock = inputs.layout, inputs.clock
        is_long = bool((layout.num_computed + layout.num_tokens > LONG_CONTEXT).any())
        adapters = inputs.token_adapters
        if inputs.has_single_tokens:
            graphs = self._decode_graphs if adapters is None else self._adapted_graphs
            if graphs is None or len(layout.slots) > graphs.max_rows:
                return None
            if adapters is not None and self._adapters is not None:
                self._adapters.check(adapters)
            decoded = graphs.run(layout.slots, layout.num_computed, is_long, clock, adapters)
            self.last_replay = graphs.last_replay
            return decoded
        prompts = self._prompt_graphs
        # The keys of long rows are split over several programs, which these graphs do not do; nor
        # do they compute adapters.
        if prompts is None or is_long or adapters is not None:
            return None
        step = prompt_step(inputs, self._attention.max_queries)
        output = prompts.run(step, clock)
        self.last_replay = prompts.last_replay if output is not None else None
        return output

    def _decode(self, table: SlotTable, inputs: DecodeInputs, is_long: bool) -> GraphOutput:
        """Decode and store a token of each row, without synchronising with the host."""
        slots, positions, groups = inputs
        metadata = self._attention.plan_decode(table, slots, positions, is_long)
        adapted = None
        if groups is not None and self._adapters is not None:
            adapted = self._adapters.of_groups(groups)
        ops = self._ops(metadata, logits_buffer=self._logits_buffer, adapted=adapted)
        logits = self.model.compute_logits(ops, self.model.forward(ops)).x
        return GraphOutput(logits, self._sample(table, logits, slots, positions))

    def _compute_prompts(self, table: SlotTable, inputs: PromptInputs) -> GraphOutput:
        """Compute a step with prompts, and store the sampled tokens."""
        metadata = self._attention.plan_blocks(table, inputs.slots, inputs.positions, inputs.blocks)
        hidden = Hidden(self._forward(metadata, inputs.sampled))
        logits = self.model.compute_logits(self._ops(logits_buffer=self._logits_buffer), hidden).x
        token_ids = self._sample(table, logits, inputs.sampled_slots, inputs.sampled_positions)
        return GraphOutput(logits, token_ids)


def _mask_by_grammar(scores: Tensor, rows: Sequence[Constrained]) -> None:
    """Set the tokens that grammars forbid to -inf, as sampling.grammar's function does."""
    numbers, masks = masks_of(rows, scores.shape[1], compute_in_parallel)
    if len(numbers):
        _mask(scores, numbers, masks)


def _mask(scores: Tensor, numbers: Ints, masks: Mask) -> None:
    mask_forbidden(scores, *send_all(scores.device, numbers, masks))


def prompt_step(inputs: StepInputs, max_queries: int) -> PromptStep:
    """Return what a graph of a step with prompts takes."""
    return PromptStep(
        inputs.token_slots,
        inputs.token_positions,
        query_blocks(inputs.layout, 0, max_queries),
        inputs.sample_places,
        inputs.sampled_slots,
        inputs.sample_positions - 1,
    )


def _progress_logger(what: str) -> Callable[[int, int], None]:
    started_at = logged_at = time.monotonic()

    def log(num_done: int, num_graphs: int) -> None:
        nonlocal logged_at
        now = time.monotonic()
        if num_done == num_graphs or now - logged_at > PROGRESS_INTERVAL_S:
            logged_at = now
            logging.info(
                "captured %d of %d CUDA graphs of %s in %.1f s",
                num_done, num_graphs, what, now - started_at,
            )  # fmt: skip

    return log
