"""The Hugging Face model: a pre-norm decoder-only language model, with any encoding in any layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from deadreckon.encodings.base import Context, Encoding
from deadreckon.encodings.maps import SelfInitialised
from deadreckon.models.cache import StateLayer
from deadreckon.models.configuration import NORMS, DeadReckonConfig
from deadreckon.models.decoder import DecoderLayer
from deadreckon.models.graphs import Steps, wanted
from deadreckon.models.loss import IGNORED, linear_cross_entropy
from deadreckon.models.rows import Rows, begins_later, carried, mark_grown, masked_first, padding, real_tokens
from deadreckon.models.state import LayerState
from deadreckon.models.tools import check_inputs, documents_in, offer_lora_targets, refuse_unknown
from deadreckon.ops.attention import check_documents
from deadreckon.ops.tracing import traced

if TYPE_CHECKING:
    from deadreckon.ops.parallel.context import ContextParallel


class DeadReckonPreTrainedModel(PreTrainedModel):
    """Base class: weight initialisation, and what transformers and accelerate need to know."""

    config_class = DeadReckonConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["state"]  # accelerate would make a copy, which then advances

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModelForCausalLM") -> None:
        """Does nothing: see :meth:`DeadReckonConfig.register_for_auto_class`."""

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *more: Any, **options: Any) -> nn.Embedding:
        """As in transformers; also resizes the tables of encodings that look tokens up."""
        embeddings = super().resize_token_embeddings(new_num_tokens, *more, **options)
        for part in self.modules():
            if isinstance(part, Encoding):
                part.resize_vocabulary(self.config.vocab_size)
        return embeddings

    def _init_weights(self, module: nn.Module) -> None:
        # transformers calls this for each module that directly holds parameters: the parts of an encoding, mostly.
        if isinstance(module, SelfInitialised):
            module.reset_parameters()  # type: ignore[operator]
        else:
            super()._init_weights(module)


class DeadReckonModel(DeadReckonPreTrainedModel):
    """Embeddings, decoder layers and the final norm.

    Attributes:
        cp: context parallelism. Every rank of its group passes the same whole sequences, and gets its shard of the
            outputs. The loss is that of whole sequences on every rank; its gradient is the *mean* of the ranks'
            gradients, which data parallelism (FSDP, DDP) computes anyway.
    """

    def __init__(self, config: DeadReckonConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            DecoderLayer(config, name, number) for number, name in enumerate(config.encodings())
        )
        self.norm = NORMS[config.norm](config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.steps: Steps | None = None
        self.cp: ContextParallel | None = None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states of (B, T) tokens; see :meth:`DeadReckonForCausalLM.forward`."""
        check_inputs(input_ids, inputs_embeds, self.config.hidden_size)
        if unused:
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            assert tokens is not None
            cu_seqlens = documents_in(unused, tokens, cu_seqlens, attention_mask, past_key_values)
            refuse_unknown(unused)
        output = self._hidden(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, past_key_values, use_cache, output_hidden_states
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _hidden(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None, past_key_values: Cache | None, use_cache: bool, output_hidden_states: bool | None,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        if past_key_values is not None and not isinstance(past_key_values, Cache):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values: expected DynamicCache(config=model.config), got a {kind}")
        wants_all = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if wants_all and (self.cp is not None or past_key_values is not None or use_cache):
            beside = "a KV cache (or use_cache=False)" if self.cp is None else "context parallelism"
            raise ValueError(f"output_hidden_states: expected False beside {beside}, got True")
        if self.cp is not None:
            if past_key_values is not None or use_cache:
                raise ValueError("past_key_values: expected no cache with context parallelism; generate on one rank")
            return self._forward_shard(input_ids, attention_mask, inputs_embeds, cu_seqlens, self.cp)
        if past_key_values is not None or use_cache:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens: packed sequences do not come in pieces; expected no cache beside it")
            if self.training and torch.is_grad_enabled():
                raise ValueError(
                    "use_cache: expected False, and no past_key_values, in training (or torch.no_grad()): what is in a "
                    "KV cache carries no gradients"
                )
            cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
            with torch.no_grad():  # else only some weights would get gradients
                x = self._continue(input_ids, inputs_embeds, attention_mask, cache)
            return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        check_documents(cu_seqlens, x, fresh=True)
        real = padding(attention_mask, x)
        order: Tensor | None = None
        if real is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens: packed sequences have no padding; expected no attention_mask beside it")
        if real is not None and traced(real):
            # While tracing, the number of real tokens is unknown: move padding to the end, where causality hides it.
            order = (~real).int().argsort(dim=1, stable=True)
            x = x.gather(1, order.unsqueeze(-1).expand_as(x))
            input_ids = None if input_ids is None else input_ids.gather(1, order)
        elif real is not None:
            # Unpad: padded rows become packed (varlen) documents, and nothing is computed for padding.
            lengths = real.sum(1)
            cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            x = x[real].unsqueeze(0)
            input_ids = None if input_ids is None else input_ids[real].unsqueeze(0)

        def in_rows(x: Tensor) -> Tensor:
            if real is None:
                return x
            if order is not None:
                x = x.gather(1, order.argsort(1).unsqueeze(-1).expand_as(x)).masked_fill(~real.unsqueeze(-1), 0)
            else:
                x = x.new_zeros(*real.shape, x.shape[-1]).index_put((real,), x[0])
            return carried(x, real)

        every: list[Tensor] | None = [] if wants_all else None
        x = in_rows(self._through_layers(x, Context.of(x, input_ids, cu_seqlens), every))
        return BaseModelOutputWithPast(
            last_hidden_state=x, hidden_states=None if every is None else (*map(in_rows, every), x)
        )

    def _through_layers(self, x: Tensor, context: Context, inputs: list[Tensor] | None = None) -> Tensor:
        """Hidden states after the final norm; each layer's input is appended to `inputs`."""
        x = self._embed(x, context)
        for layer in self.layers:
            if inputs is not None:
                inputs.append(x)
            x = layer(x, context)
        return self.norm(x)

    def _forward_shard(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        cp: ContextParallel,
    ) -> BaseModelOutputWithPast:
        """Context parallelism: hidden states of this rank's shard of whole sequences, padded to equal pieces."""
        whole = input_ids if inputs_embeds is None else inputs_embeds
        assert whole is not None
        length = whole.shape[1]
        check_documents(cu_seqlens, whole, fresh=True)
        real = padding(attention_mask, whole)
        if real is not None and bool(real.all()):  # of a tracer, which has not read the mask
            real = None
        if real is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens: packed sequences have no padding; expected no attention_mask beside it")
        if real is not None and not bool((real[:, 1:] <= real[:, :-1]).all()):
            raise ValueError("attention_mask: with context parallelism, expected padding on the right only")
        if cu_seqlens is not None and cp.padded(length) > length:  # padding is a document of its own
            cu_seqlens = pad(cu_seqlens, (0, 1), value=cp.padded(length))
        ids = None if input_ids is None else cp.shard(input_ids)
        x = self.embed_tokens(ids) if inputs_embeds is None else cp.shard(inputs_embeds)
        check_documents(cu_seqlens, x, cp)
        context = Context.of(x, ids, cu_seqlens, cp, length)
        return BaseModelOutputWithPast(last_hidden_state=self._through_layers(x, context))

    def penalty(self) -> Tensor | None:
        """The sum of the encodings' regularisation terms, added to the training loss; None if there are none."""
        penalties = [part.penalty() for part in self.modules() if isinstance(part, Encoding)]
        terms = [penalty for penalty in penalties if penalty is not None]
        return torch.stack(terms).sum() if terms else None

    def _embed(self, x: Tensor, context: Context) -> Tensor:
        """Adds absolute position embeddings, for encodings that have them."""
        encodings: dict[type[Encoding], Encoding] = {}
        for layer in self.layers:
            encoding = layer.get_submodule("self_attn.encoding")
            assert isinstance(encoding, Encoding)
            encodings.setdefault(type(encoding), encoding)
        for encoding in encodings.values():  # once, however many layers use that encoding
            x = encoding.embed(x, context)
        return x

    @torch.compiler.disable  # the host counts tokens: it would recompile for every token
    def _continue(self, ids: Tensor | None, x: Tensor | None, mask: Tensor | None, cache: Cache) -> Tensor:
        """Prefill or decode: hidden states of new tokens of sequences whose past is in the KV cache."""
        caches = [_cache_layer(cache, number) for number in range(len(self.layers))]
        tokens = x if ids is None else ids
        assert tokens is not None
        real = real_tokens(mask, caches[0].state, *tokens.shape[:2])
        if ids is not None and ids.shape[1] == 1 and real is None and wanted(ids, self):
            if self.steps is None:
                self.steps = Steps(self, self._decode)
            out = self.steps(ids, caches)
            if out is not None:
                return out
        x = self.embed_tokens(ids) if x is None else x
        if isinstance(caches[0].state, Rows) or (real is not None and not begins_later(real, caches[0].state)):
            return self._continue_rows(x, ids, mask, real, caches)
        drafts = [_uniform(layer).draft() for layer in caches]  # so that all layers advance, or none
        if real is None:
            x = self._advance(x, ids, drafts)
        else:  # masked tokens become left padding, which real tokens do not attend to
            for draft in drafts:
                masked = (~real).sum(1)
                draft.left_out = masked if draft.left_out is None else draft.left_out + masked
            order = masked_first(real)
            x = x.gather(1, order.unsqueeze(-1).expand_as(x))
            x = self._advance(x, None if ids is None else ids.gather(1, order), drafts)
            x = x.gather(1, order.argsort(1).unsqueeze(-1).expand_as(x)).masked_fill(~real.unsqueeze(-1), 0)
            x = carried(x, real)
        for layer_cache, draft in zip(caches, drafts, strict=True):
            layer_cache.state = draft
        return x

    def _decode(self, ids: Tensor, states: list[LayerState], places: Tensor) -> Tensor:
        """One decoding step, written so that a CUDA graph can capture it: ids (B, 1), places (1, 1)."""
        return self._advance(self.embed_tokens(ids), ids, states, places)

    def _advance(self, x: Tensor, ids: Tensor | None, states: list[LayerState], places: Tensor | None = None) -> Tensor:
        """Hidden states of the next tokens x (B, T, hidden_size); advances each layer's state.

        `places` (1, T) are their positions, counting masked tokens too; by default they follow from the states.
        """
        left_out = states[0].left_out
        context = (
            Context.of(x, ids).after(states[0].length) if places is None else Context(places, ids, length=x.shape[1])
        )
        if left_out is not None:
            context = replace(context, positions=context.positions - left_out.unsqueeze(1))
        context = context.remembering({})
        x = self._embed(x, context)
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, context, state=state)
        return self.norm(x)

    def _continue_rows(
        self, x: Tensor, ids: Tensor | None, mask: Tensor | None, real: Tensor | None, caches: list[StateLayer]
    ) -> Tensor:
        """New tokens of rows that differ in how many of them are real: row by row."""
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if real is None else real
        drafts = list[Rows]()
        for layer in caches:
            if isinstance(layer.state, Rows):
                drafts.append(layer.state.draft())
            else:
                assert mask is not None
                drafts.append(Rows.of(layer.state, mask[:, : -x.shape[1]].bool()))
        out = torch.zeros_like(x)
        for row, tokens in enumerate(real):
            if bool(tokens.any()):
                row_ids = None if ids is None else ids[row : row + 1, tokens]
                out[row, tokens] = self._advance(x[row : row + 1, tokens], row_ids, [d.states[row] for d in drafts])[0]
        for layer_cache, draft in zip(caches, drafts, strict=True):
            draft.advance(real)
            layer_cache.state = draft
        return carried(out, real)


def _without_first(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Labels (1, T) with the first token of each document ignored: the previous document should not predict it."""
    first = labels.new_zeros(labels.shape[1] + 1, dtype=torch.bool)  # a document without tokens may begin at the end
    first[cu_seqlens[1:-1].to(labels.device, torch.int64)] = True
    return labels.masked_fill(first[:-1], IGNORED)


def _cache_layer(cache: Cache, number: int) -> StateLayer:
    """A layer of the cache; raises a ValueError unless the cache was built from this model's configuration."""
    layer = cache.layers[number] if number < len(cache.layers) else None
    if not isinstance(layer, StateLayer):
        kind = type(layer).__name__
        raise ValueError(f"past_key_values: expected DynamicCache(config=model.config), got a cache of {kind} layers")
    return layer


def _uniform(layer: StateLayer) -> LayerState:
    """The state of a cache layer whose rows have equal lengths."""
    assert isinstance(layer.state, LayerState)
    return layer.state


class DeadReckonForCausalLM(DeadReckonPreTrainedModel, GenerationMixin):
    """Causal language model with ``from_pretrained``, ``save_pretrained`` and ``generate``, for ``Trainer``."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs: ClassVar[bool] = True  # the Trainer then passes num_items_in_batch (gradient accumulation)

    def __init__(self, config: DeadReckonConfig) -> None:
        super().__init__(config)
        offer_lora_targets(config.model_type)
        self.model = DeadReckonModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def cp(self) -> ContextParallel | None:
        """Context parallelism; see :class:`DeadReckonModel`."""
        return self.model.cp

    @cp.setter
    def cp(self, cp: ContextParallel | None) -> None:
        self.model.cp = cp

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        skip_logits: bool = False,
        output_hidden_states: bool | None = None,
        **unused: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next tokens and, with labels, the loss, which in training includes the encodings' penalties.

        Args:
            input_ids: (B, T) tokens.
            attention_mask: (B, T), 0 for padding, anywhere in a row: real tokens are computed as if it were not there.
                Logits at padding are those of the last real token before it in this call; zeros if there is none. With
                a cache, (B, past and new tokens).
            past_key_values: the KV cache of preceding tokens, at first ``DynamicCache(config=model.config)``; disables
                gradients.
            inputs_embeds: (B, T, hidden_size), in place of input_ids.
            labels: (B, T), as input_ids (they are shifted here), −100 for tokens without loss. The first token of a
                packed sequence has no loss.
            cu_seqlens: (N + 1,) boundaries of packed sequences, B = 1.
            logits_to_keep: compute logits of so many last tokens only; 0 for all. Or a tensor of token indices, (N,).
            num_items_in_batch: what the summed loss is divided by; the Trainer sets it for gradient accumulation.
            return_dict: False for a plain tuple; by default as the configuration says.
            use_cache: create a KV cache if past_key_values is None, and return it. Disables gradients.
            skip_logits: with labels, compute the loss in chunks of tokens and return no logits, to save memory. There
                are no second derivatives then.
            output_hidden_states: also return the input of each layer and the output of the final norm; not with a
                cache. By default as the configuration says.
            unused: arguments that tools pass to every model, such as ``output_attentions=False``: None, False, and the
                ``token_type_ids`` that some tokenizers add, are ignored; ``position_ids`` and ``cu_seq_lens_q`` of
                packed documents are read as `cu_seqlens`. Anything else is a TypeError.

        With context parallelism (`model.cp`) all arguments are of whole sequences, the same on every rank of its group,
        and so is the loss; logits are those of this rank's shard.
        """
        check_inputs(input_ids, inputs_embeds, self.config.hidden_size, labels)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        cu_seqlens = documents_in(unused, tokens, cu_seqlens, attention_mask, past_key_values)
        refuse_unknown({"output_attentions": self.config.output_attentions, **unused})
        if skip_logits and labels is None:
            raise ValueError("skip_logits: expected labels beside it, got None")
        some = isinstance(logits_to_keep, Tensor) or bool(logits_to_keep)
        if not isinstance(logits_to_keep, int | Tensor):
            raise ValueError(f"logits_to_keep: expected a number of tokens or their indices, got {logits_to_keep!r}")
        if some and (labels is not None or self.cp is not None):
            beside = "labels" if labels is not None else "context parallelism"
            raise ValueError(f"logits_to_keep: expected 0, all logits, beside {beside}, got {logits_to_keep}")
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, past_key_values, bool(use_cache),
            output_hidden_states, return_dict=True,
        )  # fmt: skip
        hidden, logits, loss = outputs.last_hidden_state, None, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and outputs.past_key_values is None):
            if not skip_logits:
                kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
                logits = self.lm_head(hidden[:, kept] if some else hidden)
            if labels is not None:
                masked = self.cp is not None and attention_mask is not None and attention_mask == 0
                if isinstance(masked, Tensor) and bool((masked & (labels != IGNORED)).any()):
                    raise ValueError("labels: expected -100 where tokens are masked, beside context parallelism")
                if cu_seqlens is not None:
                    labels = _without_first(labels, cu_seqlens)
                loss = self._loss(hidden, logits, labels, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _loss(self, hidden: Tensor, logits: Tensor | None, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """The mean loss over labels (B, T), or its sum divided by `items`, from logits, or from hidden (B, T, D)."""
        if logits is not None and self.cp is None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=items
            )
        else:
            expected = pad(labels[:, 1:], (0, 1), value=IGNORED)
            count = (expected != IGNORED).sum() if items is None else items
            expected = (expected if self.cp is None else self.cp.shard(expected, value=IGNORED)).flatten()
            expected = expected.to(hidden.device)
            if logits is None:
                loss = linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, expected)
            else:
                loss = cross_entropy(logits.flatten(0, 1).float(), expected, ignore_index=IGNORED, reduction="sum")
            loss = loss / count if self.cp is None else self.cp.sum_of_losses(loss / count)
        penalty = self.model.penalty() if self.training else None
        if penalty is None:
            return loss
        if items is not None:  # gradient accumulation: the micro-batches' shares add up to one penalty
            penalty = penalty * ((labels[:, 1:] != IGNORED).sum() / items)
        return loss + penalty

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with a clear error for static caches, which this model does not have."""
        kind = generation_config.cache_implementation
        if kind in ("static", "offloaded_static", "sliding_window"):
            raise ValueError(f"cache_implementation: expected None, 'dynamic' or 'offloaded', got {kind!r}")
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers. The new token's mask is known to be one, which saves a host-device synchronisation."""
        before = model_kwargs.get("attention_mask")
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        mask = model_kwargs.get("attention_mask")
        if before is not None and mask is not None:
            mark_grown(mask, before.shape[1])
        return model_kwargs


AutoConfig.register("deadreckon", DeadReckonConfig, exist_ok=True)
AutoModel.register(DeadReckonConfig, DeadReckonModel, exist_ok=True)
AutoModelForCausalLM.register(DeadReckonConfig, DeadReckonForCausalLM, exist_ok=True)
