# SPDX-License-Identifier: Apache-2.0
"""What every field of a request to the host does to its answer's bits.

A field that no group names turns `test_every_request_field_is_classified` red: a
later host has grown it, and somebody has to say what it does.
"""

from __future__ import annotations

PROMPT = frozenset(
    (
        *("text", "input_ids", "input_text", "prompt", "suffix", "messages", "input"),
        *("instructions", "query", "items", "item_first", "system", "template", "raw"),
        *("context", "chat_template_kwargs", "continue_final_message", "tools"),
        *("tool_choice", "parallel_tool_calls", "max_tool_calls", "reasoning_effort"),
        *("thinking", "think", "reasoning", "truncation", "previous_response_id"),
        *("task", "output_config", "betas"),
    )
)
"""Makes the token ids of the prompt, before anything is served."""

SAMPLING = frozenset(
    (
        *("sampling_params", "options", "temperature", "top_p", "top_k", "min_p", "n"),
        *("seed", "stop", "stop_sequences", "stop_token_ids", "stop_regex", "best_of"),
        *("no_stop_trim", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("min_tokens", "ignore_eos", "logit_bias", "skip_special_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("regex", "ebnf", "json_schema", "response_format", "format"),
        *("custom_logit_processor", "custom_params"),
        *("require_reasoning", "max_thinking_tokens"),
    )
)
"""Becomes sampling parameters (classified one by one in `hooks/requests.py`), a custom
logit processor, or a grammar."""

OUTPUT = frozenset(
    (
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "logprobs"),
        *("token_ids_logprob", "top_logprobs", "echo", "return_text_in_logprobs"),
        *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
        *("return_flat_raw_top_logprobs_b64", "return_prompt_token_ids"),
        *("return_token_ids", "return_input_ids_in_sglext", "return_meta_info"),
        *("return_output_ids_in_sglext", "return_bytes", "return_entropy", "include"),
        *("return_cached_tokens_details", "return_spec_tokens_details"),
        *("stream", "stream_options", "stream_reasoning", "separate_reasoning"),
        *("label_token_ids", "apply_softmax", "return_token_logprobs"),
        *("score_extraction_token", "sampling_logprobs_mode"),
    )
)
"""Chooses which of the computed numbers are sent, and in which form.

`test_endpoints` compares the numbers; `sampling_logprobs_mode` counts only beside
`return_sampling_mask`, which is refused.
"""

LABELS = frozenset(
    (
        *("rid", "request_id", "session_id", "model", "user", "metadata", "store"),
        *("log_metrics", "no_logs", "custom_labels", "conversation_id", "background"),
        *("external_trace_header", "received_time", "time_stats", "http_worker_ipc"),
        *("service_tier", "keep_alive", "lora_name", "routing_key", "priority"),
        *("extra_key", "cache_salt", "kv_hints", "pp_prefetch_ticketed"),
        *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("decode_tp_size",),
    )
)
"""Names, routes or orders requests. Order moves no bit; priority preemption, prefix
caches, disaggregation and data parallelism are refused at start-up."""

REFUSED = frozenset(
    (
        *("input_embeds", "image_data", "video_data", "audio_data", "mm_inputs"),
        *("images", "watermark", "return_hidden_states", "return_sampling_mask"),
        *("session_params", "lora_path", "lora_id", "positional_embed_overrides"),
        *("token_type_ids", "token_indices_to_pool", "multi_item_delimiter_indices"),
        *("embed_override_token_id", "item_embed_overrides", "query_embed_overrides"),
        *("return_pooled_hidden_states",),
    )
)
"""Ends the request with status 400 when it is used."""

IDLE = frozenset(
    (
        *("mm_hashes", "mm_content_hashes", "use_audio_in_video", "video_config"),
        *("modalities", "need_wait_for_mm_inputs", "num_items_assigned"),
        *("encoder_urls", "max_dynamic_patch", "min_dynamic_patch", "images_config"),
        *("image_max_dynamic_patch", "video_max_dynamic_patch"),
        *("mm_processor_kwargs", "return_routed_experts", "routed_experts_start_len"),
        *("return_indexer_topk",),
    )
)
"""Says something about images, video, audio, experts or sparse attention, of which
there are none here."""

GROUPS = (PROMPT, SAMPLING, OUTPUT, LABELS, REFUSED, IDLE)
