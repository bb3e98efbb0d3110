"""Fields of a checkpoint's JSON files that no reader uses: known as harmless, or warned about.

A model whose field is silently ignored may differ from the model that was trained. So a reader
records which fields it reads (`ReadFields`) and reports the others at the end. The fields listed
below change no token and no probability; any other unread field is named in a warning. A field that
matters and is not supported is refused by its reader, with `must_be`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewise.errors import CheckpointError, shown

__all__ = ["ReadFields", "must_be", "tell_unread"]


def _words(names: str) -> tuple[str, ...]:
    """Return the words of a text that white space separates."""
    return tuple(names.split())


# Origin: the file's author, tool and source.
_ORIGIN = _words(
    """
    _name_or_path name_or_path _commit_hash transformers_version tokenizer_class torch_dtype
    dtype license unsloth_version unsloth_fixed model_name base_model_name_or_path
    torchao_version vllm_version _diffusers_version is_llama_config transformers.js_config
    """
)
# Python files beside the checkpoint, which are never run.
_CODE = ("auto_map", "custom_pipelines", "trust_remote_code")
# Settings of transformers' classes that change results by rounding alone, such as products cut into
# parts that are summed, or a scaling of the keys first.
_RUNNING = _words(
    """
    use_cache return_dict output_attentions output_hidden_states torchscript use_bfloat16
    chunk_size_feed_forward attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _experts_implementation
    _experts_implementation_internal experts_implementation cache_implementation use_flash_attn
    _flash_attn_2_enabled gradient_checkpointing tf_legacy_loss pretraining_tp
    reorder_and_upcast_attn output_router_logits
    """
)
# Settings of training alone: initialisation, dropout, auxiliary losses.
_TRAINING = _words(
    """
    initializer_range initializer_factor attention_dropout hidden_dropout hidden_dropout_prob
    attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout router_aux_loss_coef
    aux_loss_alpha seq_aux use_flash_attention_2 ep_size embedding_dropout neftune_noise_alpha
    """
)
# Settings of heads for other tasks than language modelling.
_TASKS = _words(
    """
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout classifier_dropout is_decoder tie_encoder_decoder
    cross_attention_hidden_size decoder_start_token_id
    """
)
# Special tokens other than bos and eos: those in the tokenizer's files are used.
_TOKENS = _words(
    """
    pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id prefix
    """
)
# Sampling parameters in the config.json of older checkpoints; transformers drops them there, too.
_DRAWING = _words(
    """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """
)
_CONFIG = (*_ORIGIN, *_CODE, *_RUNNING, *_TRAINING, *_TASKS, *_TOKENS, *_DRAWING)

HARMLESS: dict[str, frozenset[str]] = {
    "config.json": frozenset(_CONFIG),
    # Settings of poolers and of other heads, of training, and of transformers' own ways to run; an
    # encoder draws no token, and pads none.
    "encoders": frozenset(
        _words("""
        bos_token_id eos_token_id tie_word_embeddings directionality pooler_fc_size
        pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
        pooler_type output_past position_embedding_type classifier_pooling classifier_bias
        classifier_activation decoder_bias deterministic_flash_attn sparse_prediction
        sparse_pred_ignore_index reference_compile repad_logits_with_grad mlp_dropout
        initializer_cutoff_factor layer_norm_eps sentence_transformers
        sbert_ce_default_activation_function qa_dropout seq_classif_dropout sinusoidal_pos_embds
        tie_weights_ max_trained_positions n_positions is_matryoshka matryoshka_dimensions
        final_logit_softcapping sliding_window_pattern _sliding_window_pattern
        bidirectional_attention head_dim tokenizer_class
    """)
    ),
    # Packed experts are unpacked if no kernel multiplies them, whatever the file says; the tensors
    # show which modules are plain.
    "quantization_config": frozenset(("modules_to_not_convert", "dequantize")),
    "generation_config.json": frozenset(
        (
            *_ORIGIN,
            *_CODE,
            *_RUNNING,
            *_TOKENS,
            # Fields read with config.json, buffer lengths of transformers, and contents of its
            # outputs.
            *_words("""
            eos_token_id bos_token_id _from_model_config max_length cache_config
            return_legacy_cache output_logits output_scores return_dict_in_generate
            decoder_start_token_id compile_config disable_compile prefill_chunk_size
        """),
            # Settings of beam search and of drafts, which are options here.
            *_words("""
            length_penalty early_stopping low_memory num_assistant_tokens
            num_assistant_tokens_schedule assistant_confidence_threshold use_mtp
            assistant_early_exit assistant_lookbehind target_lookbehind is_assistant
            prompt_lookup_num_tokens max_matching_ngram_size chat_format max_window_size
            continuous_batching_config renormalize_logits remove_invalid_values
        """),
        )
    ),
    "tokenizer_config.json": frozenset(
        (
            *_ORIGIN,
            *_CODE,
            # tokenizer.json says how a text is split; special tokens are read.
            *_words("""
            add_prefix_space add_bos_token add_eos_token legacy errors sp_model_kwargs
            spaces_between_special_tokens do_lower_case strip_accents tokenize_chinese_chars
            use_fast from_slow init_inputs vocab_file merges_file tokenizer_file
            special_tokens_map_file tokenizer_type is_local local_files_only backend
            files_loaded added_tokens_decoder additional_special_tokens extra_special_tokens
            keep_accents model_specific_special_tokens vocab_size
        """),
            # A server neither pads nor truncates; the context length is config.json's.
            *_words("""
            model_max_length max_length padding_side truncation_side padding truncation
            truncation_strategy stride pad_to_multiple_of pad_token_type_id model_input_names
            return_token_type_ids return_tensors device_map
        """),
            # Settings of chats and of images.
            *_words("""
            chat_template use_default_system_prompt processor_class response_schema
            response_template image_processor_type verbose
        """),
        )
    ),
}
"""By file: what may stand there unread, and why. A family has its own list, too."""


class ReadFields(Mapping[str, Any]):
    """A JSON object that records the names of the fields that are read from it, in `names`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def unread(self, *places: str) -> list[str]:
        """Return the names of the fields that have a value, were not read, and are not harmless.

        `places` are the keys of HARMLESS whose lists count.
        """
        known = self.names.union(*(HARMLESS.get(place, ()) for place in places))
        return [
            name for name, value in self._fields.items() if name not in known and value is not None
        ]


def tell_unread(file: str, names: Iterable[str]) -> None:
    """Warn, if there are any names, that these fields of a file are not known, and so have no
    effect."""
    listed = ", ".join(map(shown, names))
    if listed:
        warnings.warn(
            f"{file} has fields that tilewise does not know and leaves out: {listed}", stacklevel=3
        )


def must_be(fields: Mapping[str, Any], name: str, *allowed: object) -> None:
    """Refuse an unsupported value of a field; absent and null are allowed.

    A value is allowed if it equals one of `allowed` and has the same type: 1.0 and True are not 1.

    Raises:
        CheckpointError: the value is none of `allowed`.
    """
    value = fields.get(name)
    if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
        names = " or ".join(map(_as_json, allowed)) if allowed else "absent"
        raise CheckpointError(f"{name} must be {names}, got {_as_json(value)}")


def _as_json(value: object) -> str:
    return shown(value).lower() if isinstance(value, bool) else shown(value)
