# SPDX-License-Identifier: Apache-2.0
"""Every argument of the host in one of three classes, so that a new one shows.

`scope.ALLOWED` and its like settle what moves bits. The tables here hold the rest: what
must be left alone, and what may be given because it moves no bits. A test holds them
against the host's own ServerArgs: each argument in exactly one class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_exact.reasons import Reason


def _names(groups: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in groups.items() for name in names.split()}


# Why -> arguments that must stay at the host's default.
LEFT_ALONE: dict[str, str] = _names(
    {
        "another server in place of the one whose requests are looked at": """
            sidecar sidecar_args encoder_only language_only encoder_urls
            encoder_register_urls enable_adaptive_dispatch_to_encoder elastic_ep_backend
            ep_join_mode max_ep_size elastic_ep_initial_size enable_pd_role_switch
            gated_launch_port""",
        "code that is not pinned": """
            custom_weight_loader msprobe_dump_config enable_amd_monokernel
            model_config_parser""",
        "each layer's output goes through other code": """
            debug_cuda_graph debug_tensor_dump_output_folder debug_tensor_dump_layers
            debug_tensor_dump_input_file enable_torch_compile_debug_mode
            enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids kv_canary""",
        "weights are not those of the checkpoint, or not there at the self-test": """
            modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
            modelopt_export_path quantization_param_path startup_weight_load_mode
            kt_weight_path uno_lora_path""",
        "no such attention was compared with plain decode": """
            triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
            triton_attention_split_tile_size enable_fused_qk_norm_rope enable_hisparse
            prefill_only_disable_kv_cache enable_kv_cache_sharding
            enable_cp_decode_attn_tp""",
        "no such layer or sum of ranks was compared": """
            enable_fused_moe_sum_all_reduce enable_scattered_sconv
            enable_shared_experts_attn_tp enable_dense_mlp_attn_tp
            shared_experts_tp_size enable_eplb enable_paged_experts enable_waterfill
            enable_elastic_expert_backup ep_num_redundant_experts moe_runner_backend
            moe_a2a_backend speculative_moe_runner_backend speculative_moe_a2a_backend
            boundary_reduction speculative_boundary_reduction
            enable_tp_lm_head_all_to_all mlx_enable_sampling enable_w4a4_mxfp4_megamoe
            enable_megamoe_for_layernorm_sp enable_deepseek_v4_fp4_indexer""",
        "no such draft was compared with plain decode": """
            enable_multi_layer_eagle speculative_token_map speculative_adaptive_config
            speculative_draft_kv_cache_dtype speculative_dspark_sps_table_path
            speculative_dspark_confidence_sts_path
            speculative_dspark_align_verify_tokens_to_graph_tier""",
        "the thinking phase would draw from masked logits": "enable_strict_thinking",
    }
)

# Why it may be given -> arguments.
HARMLESS: dict[str, str] = _names(
    {
        "addresses, keys and names": """
            host port fastapi_root_path nccl_port dist_timeout dist_init_addr node_rank
            enable_http2 http2_max_concurrent_streams
            http2_initial_connection_window_size enable_http_worker_reuseport
            ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
            enable_ssl_refresh api_key admin_api_key served_model_name weight_version
            file_storage_path smg_http_sidecar_port grpc_worker_threads
            grpc_response_timeout_secs engine_info_bootstrap_port allowed_media_domains
            media_url_max_file_size_mb tool_server""",
        "the text around the tokens, the same with and without drafts": """
            tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init
            detokenizer_worker_num chat_template trust_request_chat_template
            hf_chat_template_name completion_template reasoning_parser tool_call_parser
            default_chat_template_kwargs sampling_defaults preferred_sampling_params
            stream_interval batch_notify_size stream_response_default_include_usage
            incremental_streaming_output return_input_ids return_output_ids
            enable_cache_report enable_dynamic_batch_tokenizer
            dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
            enable_tokenizer_batch_encode disable_tokenizer_batch_decode
            enable_response_store""",
        "one grammar and one way to draw for every path": """
            grammar_backend constrained_json_whitespace_pattern
            constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
            disable_outlines_disk_cache enable_custom_logit_processor random_seed""",
        "refused or served by what the request asks": """
            enable_return_hidden_states return_hidden_states_mode
            enable_return_routed_experts enable_return_indexer_topk
            sampling_mask_max_tokens allow_auto_truncate""",
        "the model as it is built is looked at": """
            model_path revision context_length enable_multimodal language_model_only
            trust_remote_code json_model_override_args model_loader_extra_config
            download_dir model_checksum delete_ckpt_after_loading decrypted_config_file
            decrypted_draft_config_file weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load modelexpress_config
            remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports
            remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine
            weight_cache_mode weight_cache_socket weight_cache_timeout
            checkpoint_engine_wait_weights_before_ready enable_memory_saver
            enable_weights_cpu_backup enable_draft_weights_cpu_backup""",
        "looked at after it was resolved": """
            cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
            disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph
            cuda_graph_max_bs_prefill cuda_graph_bs_prefill
            cuda_graph_prefill_max_context chunked_prefill_size mamba_track_interval
            max_prefill_tokens max_running_requests disable_custom_all_reduce
            tokenizer_worker_num speculative_algorithm speculative_num_draft_tokens
            speculative_dflash_block_size speculative_dspark_block_size
            speculative_ngram_max_bfs_breadth""",
        "sizes of memory": """
            mem_fraction_static max_total_tokens max_mamba_cache_size
            mamba_full_memory_ratio swa_full_tokens_ratio disable_hybrid_swa_memory
            num_reserved_decode_tokens swa_prefix_tails hicache_host_memory_fraction
            _swa_full_tokens_ratio_explicitly_set""",
        "rows and prompt cuts do not depend on who is served when": """
            max_queued_requests prefill_decode_interval prefill_decode_interval_min_bs
            prefill_max_requests schedule_policy schedule_conservativeness
            default_priority_value abort_on_priority_when_disabled
            disable_priority_preemption schedule_low_priority_values_first
            priority_scheduling_preemption_threshold retraction_policy
            disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
            enable_prefill_delayer prefill_delayer_max_delay_passes
            prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
            prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
            min_free_slots_delay pp_max_micro_batch_size pp_async_batch_depth
            load_balance_method""",
        "rows do not depend on the padding of a graph": """
            cuda_graph_max_bs_decode cuda_graph_bs_decode disable_cuda_graph_padding
            cuda_graph_max_seq_len_prefill
            enable_profile_cuda_graph enable_cudagraph_gc torch_compile_max_bs""",
        "device and process": """
            device base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout
            sleep_on_idle custom_sigquit_handler numa_node gc_threshold
            skip_server_warmup warmups enable_p2p_check pre_warm_nccl
            enable_layerwise_nvtx_marker disable_flashinfer_autotune
            flashinfer_autotune_skip_ops""",
        "logs, traces and metrics": """
            log_level log_level_http log_requests log_requests_level log_requests_format
            log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder
            show_time_cost enable_metrics enable_mfu_metrics
            enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header
            tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency
            bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
            gc_warning_threshold_secs decode_log_interval
            enable_request_time_stats_logging kv_events_config load_publish_endpoint
            enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules
            otlp_traces_endpoint otlp_service_name export_metrics_to_file
            export_metrics_to_file_dir stat_loggers expert_balancedness_report_mode
            spec_trace_dir""",
        "drafts are proposals, every one is verified": """
            speculative_draft_model_path speculative_draft_model_revision
            speculative_draft_load_format speculative_num_steps
            speculative_draft_attention_backend speculative_draft_window_size
            speculative_draft_sink_size speculative_draft_model_quantization
            _speculative_draft_quantization_explicitly_set
            speculative_domino_candidate_pool_size speculative_ngram_max_trie_depth
            speculative_ngram_capacity speculative_ngram_match_type
            speculative_ngram_external_corpus_max_tokens""",
        "a cached prefix has the bits of a computed one": """
            disable_radix_cache radix_eviction_policy radix_eviction_policy_config
            _radix_eviction_policy_explicitly_set strip_thinking_cache
            mamba_max_states_per_path uses_mamba_radix_cache""",
        "part of other caches of prefixes and states, which are off": """
            disable_chunked_prefix_cache mamba_cache_philox_rounds int8_mamba_ckpt_size
            linear_replayssm_cache_len hicache_host_memory_mode hicache_ratio
            hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
            hicache_storage_backend hicache_storage_prefetch_policy
            hicache_storage_backend_extra_config
            hicache_storage_prefetch_retry_poll_interval
            hicache_storage_prefetch_retry_max_attempts
            unified_cache_external_linker_backend unified_cache_external_linker_config
            enable_linker_mla_dedup lmcache_config_file flexkv_config_file""",
        "part of images, sound or an encoder, which no request may use": """
            asr_max_buffer_seconds asr_max_concurrent_sessions mm_attention_backend
            enable_precise_embedding_interpolation enable_broadcast_mm_inputs_process
            enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config
            mm_processor_worker_num mm_io_worker_num mm_preprocess_cache_size_mb
            trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache
            image_processor_backend mm_global_cache_backend disable_fast_image_processor
            mm_feature_transport encoder_transfer_backend encoder_bootstrap_port""",
        "part of a split server, adapters, offloading or watermarks, which are off": """
            disaggregation_transfer_backend disaggregation_bootstrap_port
            disaggregation_ib_device disaggregation_decode_enable_radix_cache
            disaggregation_decode_enable_offload_kvcache
            disaggregation_decode_retraction_backup disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval disaggregation_enable_kv_checksum
            disaggregation_decode_host_receive_threshold
            disaggregation_decode_allocation_policy optimistic_prefill_attempts
            pdmux_config_path sm_group_num decoupled_spec_bind_endpoint
            decoupled_spec_connect_endpoints decoupled_spec_rank
            enable_lora_overlap_loading max_lora_rank lora_target_modules
            max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend
            max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts
            lora_strict_loading lora_drain_wait_threshold offload_num_in_group
            offload_prefetch_step offload_mode tbo_token_distribution_threshold
            dllm_algorithm_config dllm_fdfo watermark_config watermark_key
            watermark_key_b watermark_context_window watermark_mixing_probability
            watermark_max_probability watermark_default_enabled watermark_enforce_all
            kv_canary_real_data kv_canary_sweep_interval""",
        "part of experts, quantised layers or layouts of ranks, which are refused": """
            deepep_v2_mode flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode
            deepep_dispatcher_output_dtype ep_dispatch_algorithm init_expert_location
            eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
            eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
            expert_distribution_recorder_buffer_size deepep_config mooncake_ib_device
            ep_join_rank_offset elastic_ep_scale_timeout
            disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
            enforce_shared_experts_fusion flashinfer_a2a_dispatch_type
            speculative_enable_w4a4_mxfp4_megamoe paged_experts_num_resident kt_method
            kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
            kt_max_deferred_experts_per_token
            fp4_gemm_runner_backend prefill_kv_cache_dequant_dtype dcp_comm_backend
            dcp_replicate_q_proj cp_strategy enable_dsa_cache_layer_split
            enable_dp_attention_local_control_broadcast disable_attn_tp_gather
            enforce_disable_flashinfer_allreduce_fusion enable_dynamic_chunking
            disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode""",
        "part of a model that is not served": """
            c128_page_size dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend
            dsa_paged_mqa_logits_backend dsa_topk_backend speculative_dsa_topk_backend
            dsv4_attn_backend dsa_triton_union enable_dsa_fused_indexer
            flashinfer_mla_disable_ragged hisparse_config qsa_indexer_dtype
            enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
            ple_offload_embedding ple_offload_backend ple_offload_dir""",
    }
)


def left_alone_reasons(args: Any, given: Iterable[str]) -> list[Reason]:
    """Reasons in the `given` raw arguments: those that must stay at their default."""
    reasons = []
    for name in sorted(set(given) & LEFT_ALONE.keys()):
        flag = "--" + name.replace("_", "-")
        reasons.append(
            Reason(
                f"{flag} {getattr(args, name)}",
                f"not given ({LEFT_ALONE[name]})",
                f"drop {flag}",
            )
        )
    return reasons
