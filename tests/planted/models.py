"""Mistakes in layouts, family tables, plans and checksums."""

LAYOUT = "unit/test_layout.py"
SHARDS = "unit/models/test_shards.py"
ENGINE = "unit/models/test_engine.py"
CHECKSUM = "unit/weights/test_checksum.py"
COPIES = "unit/weights/test_copies.py"
DEVICES = "dist/test_devices.py"
TRANSPORTS = "dist/test_transports.py"
PLAN = "unit/weights/test_plan.py"
COST = "unit/weights/test_weight_sync.py"
KINDS = "unit/trainer/test_layer_kinds.py"

MODELS = [
    (
        "layout.py",
        "        tp, cp, dp, pp = digits(\n"
        "            parallel.tensor, parallel.context, world // parallel.dense, parallel.pipeline\n",
        "        tp, cp, pp, dp = digits(\n"
        "            parallel.tensor, parallel.context, parallel.pipeline, world // parallel.dense\n",
        f"{LAYOUT}::test_tensor_is_fastest_and_pipeline_slowest",
    ),
    (
        "layout.py",
        "(per_chunk + 1,) * rest + (per_chunk,) * (count - rest)",
        "(per_chunk,) * (count - rest) + (per_chunk + 1,) * rest",
        f"{LAYOUT}::test_earlier_stages_have_one_more",
    ),
    (
        "layout.py",
        "if (len(sizes), sum(sizes)) != (count, num_layers):",
        "if len(sizes) != count:",
        f"{LAYOUT}::test_layers_that_are_not_those_of_the_model_are_refused",
    ),
    (
        "layout.py",
        "return lcm(parallel.dense, parallel.sparse, ranks_per_replica)",
        "return max(parallel.dense, parallel.sparse, ranks_per_replica)",
        f"{LAYOUT}::test_smallest_world_holds_trainer_experts_and_replica",
    ),
    (
        "models/shards.py",
        "yield self._slice(1, count * tp.rank, count)",
        "yield self._slice(1, 0, count)",
        f"{SHARDS}::test_all_ranks_together_hold_every_element",
    ),
    (
        "models/shards.py",
        "for name, heads in zip(self.hf, (queries, 1, 1), strict=True):",
        "for name, heads in zip((self.hf[0], self.hf[2], self.hf[1]), (queries, 1, 1), strict=True):",
        f"{SHARDS}::test_a_group_is_its_queries_then_its_key_then_its_value",
    ),
    (
        "models/shards.py",
        "offset=local * numel + part.offset",
        "offset=part.offset",
        f"{ENGINE}::test_experts_lie_one_after_another",
    ),
    (
        "models/shards.py",
        "Axis(shards, tp.rank * shards // tp.size)",
        "Axis(shards, tp.rank % shards)",
        f"{ENGINE}::test_key_values_are_repeated_where_the_engine_has_more_ranks_than_heads",
    ),
    (
        "models/deepseek_v3.py",
        "min(layers, config.count(",
        "min(layers, 1 + config.count(",
        f"{ENGINE}::test_experts_lie_one_after_another",
    ),
    (
        "models/shards.py",
        "if tp.first or not self.is_first_only:",
        "if True:",
        f"{ENGINE}::test_a_bias_that_is_added_once_is_kept_once",
    ),
    (
        "models/engine.py",
        "VOCAB_MULTIPLE = 64",
        "VOCAB_MULTIPLE = 32",
        f"{ENGINE}::test_vocabulary_is_padded_to_64",
    ),
    (
        "models/shards.py",
        "for part in sorted(loaded ^ expected, key=str):",
        "for part in sorted(loaded - expected, key=str):",
        f"{ENGINE}::test_loaders_that_differ_are_named",
    ),
    (
        "weights/sync/execute.py",
        "flat = flat.to(CPU)",
        "pass",
        "unit/checkpoint/test_hf.py::test_parameters_on_another_device_are_exported_from_there",
    ),
    (
        "weights/sync/checksum.py",
        "torch._foreach_add_(result.unbind(), list(map(len, data)))",
        "pass",
        f"{CHECKSUM}::test_length_counts",
    ),
    (
        "weights/sync/checksum.py",
        "running = (_halves(torch.cat(rows)) * weights)",
        "running = _halves(torch.cat(rows))",
        f"{CHECKSUM}::test_the_checksum_of_a_known_message",
    ),
    (
        "weights/sync/copies.py",
        "    return not np.array_equal(_integers(read).numpy(), _integers(part).numpy())",
        "    return False",
        f"{COPIES}::test_memory_that_does_not_keep_what_is_written_is_seen",
    ),
    (  # a batch compared with itself
        "weights/sync/copies.py",
        "copy_all(back, into[batch])",
        "copy_all(back, parts[batch])",
        f"{COPIES}::test_one_piece_among_many_that_overwrites_another_is_seen",
    ),
    (
        "weights/sync/copies.py",
        "(_integers(read) != _integers(region))",
        "(_integers(read) != _integers(read))",
        f"{COPIES}::test_memory_that_does_not_keep_what_is_written_is_seen",
    ),
    (  # only the last batch counts
        "weights/sync/copies.py",
        "return reduce(torch.logical_or, wrong)",
        "return wrong[-1]",
        f"{COPIES}::test_one_piece_among_many_that_overwrites_another_is_seen",
    ),
    (  # the last piece of a batch is skipped
        "weights/sync/copies.py",
        "    yield slice(first, len(pieces))",
        "    yield slice(first, len(pieces) - 1)",
        f"{COPIES}::test_pieces_are_copied_whatever_their_strides_and_dtypes",
    ),
    (
        "weights/sync/copies.py",
        "            first = number\n",
        "            first = number + 1\n",
        f"{COPIES}::test_every_piece_of_a_message_arrives_in_its_place",
    ),
    (  # transposed pieces
        "weights/sync/copies.py",
        "piece.dtype, target.is_contiguous(), rest",
        "piece.dtype, True, rest",
        f"{COPIES}::test_every_piece_of_a_message_arrives_in_its_place",
    ),
    (  # columns of other widths, which only other devices than a CPU join
        "weights/sync/copies.py",
        "else piece.shape[1:]",
        "else ()",
        DEVICES,
    ),
    (
        "weights/sync/checksum.py",
        "running[end - 1] for end",
        "running[end - 2] for end",
        f"{CHECKSUM}::test_the_checksum_of_a_known_message",
    ),
    (  # messages that are summed together share the sums of their rows
        "weights/sync/checksum.py",
        "totals.diff(prepend=totals.new_zeros(1))",
        "totals",
        f"{CHECKSUM}::test_messages_that_are_summed_together_have_their_own_checksums",
    ),
    (
        "weights/sync/checksum.py",
        "zip(tails.view(torch.uint8), rests, strict=True)], rests",
        "zip(tails.view(torch.uint8), rests, strict=True)], [x * 0 for x in rests]",
        f"{CHECKSUM}::test_one_bit_anywhere",
    ),
    (
        "weights/sync/execute.py",
        "            add_checksums(sums[1], incoming)\n",
        "            add_checksums(sums[1], incoming[:1])\n",
        DEVICES,
    ),
    (
        "weights/sync/execute.py",
        "            add_checksums(sums[1], incoming)\n",
        "            sums[1] = sums[0]\n",
        TRANSPORTS,
    ),
    (
        "weights/sync/checksum.py",
        "_weights_at(offset, size, dim + 2, part.device)",
        "_weights_at(0, size, dim + 2, part.device)",
        f"{CHECKSUM}::test_the_right_slice_in_the_wrong_place_shows_although_plain_sums_agree",
    ),
    (
        "weights/sync/placement.py",
        "(sums[1:] * copies[0] == sums[0] * copies[1:]) & is_whole[0] & is_whole[1:]",
        "is_whole[0] & is_whole[1:]",
        "unit/weights/test_placement_check.py::test_a_slice_in_the_wrong_place_is_refused",
    ),
    (
        "weights/sync/placement.py",
        "(counts > 0) & (counts % numel == 0)",
        "counts >= 0",
        "unit/weights/test_placement_check.py",
    ),
    (
        "weights/plan/senders.py",
        "direct = np.flatnonzero(is_near | (first == receiver))",
        "direct = np.arange(len(first))",
        f"{PLAN}::test_what_a_node_shares_crosses_the_network_once",
    ),
    (
        "weights/plan/senders.py",
        "(np.arange(count) - rotation[:, None]) % count",
        "np.arange(count) + 0 * rotation[:, None]",
        f"{PLAN}::test_replicas_share_the_sending",
    ),
    (
        "weights/plan/rounds.py",
        "capacity = np.full(KINDS, round_numel, dtype=np.int64)",
        "capacity = np.full(KINDS, 4 * round_numel, dtype=np.int64)",
        f"{PLAN}::test_rounds_keep_to_the_limit",
    ),
    (
        "weights/plan/cost.py",
        "far = [per_rank(rank, np.where(is_near, 0, size)) for rank in ends]",
        "far = [per_rank(rank, size) for rank in ends]",
        f"{COST}::test_cost_of_a_plan_worked_by_hand",
    ),
    (
        "weights/plan/cost.py",
        "into_nodes = lacking / np.bincount(nodes) / links.network",
        "into_nodes = lacking / links.network",
        f"{COST}::test_cost_of_a_plan_worked_by_hand",
    ),
    (
        "models/shape.py",
        "kinds[min(layer, len(kinds) - 1)]",
        "kinds[0]",
        f"{KINDS}::test_its_tensors_are_those_of_the_folder",
    ),
    (
        "models/shards.py",
        "if kind not in self.layers:",
        "if not self.layers:",
        f"{KINDS}::test_a_table_that_lacks_a_kind_is_refused",
    ),
    (
        "weights/plan/tables.py",
        "kind = self._shape.kind(section.layers[0])",
        "kind = self._shape.kind(1)",
        f"{KINDS}::test_every_element_arrives_once",
    ),
    (
        "weights/plan/tables.py",
        "np.flatnonzero([other == kind for other in kinds])",
        "np.arange(kinds.index(kind), len(kinds))",
        f"{KINDS}::test_every_element_arrives_once",
    ),
    (
        "models/registry.py",
        ").intersection(hf_shapes(shape, mtp=True))",
        ")",
        f"{KINDS}::test_adapters_scales_and_fp32_tensors_are_those_of_each_kind",
    ),
    (
        "trainer/router_replay.py",
        "sum(has_experts[:layer]) for",
        "layer for",
        f"{KINDS}::test_routers_are_numbered_among_the_layers_that_have_one",
    ),
    (
        "trainer/model.py",
        "kind.is_attention and not",
        "not",
        f"{KINDS}::test_layers_that_are_no_attention_share_no_prefixes_and_need_whole_rows",
    ),
    (
        "config/train.py",
        "context > 1 and not all(kind.is_attention for kind in shape.layer_kinds)",
        "False",
        f"{KINDS}::test_layers_that_are_no_attention_share_no_prefixes_and_need_whole_rows",
    ),
    (
        "config/model.py",
        "if not all(kind.has_experts for kind in shape.layer_kinds):",
        "if not shape.is_moe:",
        f"{KINDS}::test_the_width_of_dense_layers_is_checked_where_there_are_some",
    ),
]
