"""The ways in which ranks come to disagree about an overflow, or agree on a wrong result, and the tests that show each one.

The numbers are those of the project's notes on mixed precision; S09, S24 and S27 are not assigned. A test is named by module
and function. "torch" is the effect with ``torch.amp.GradScaler`` (or with what the row names), "dtrain" the remedy here. The
tests below check that the table is complete and that every named test exists.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest

_HERE = "tests.precision.scenarios"
_RANKS = "tests.precision.test_grad_scaler_ranks"
_STEP = "tests.training.test_step"


@dataclass(frozen=True)
class Scenario:
    """A row.

    Attributes:
        number: Of the scenario; a letter names a variant.
        what: The situation.
        torch: The effect with torch's scaler, or ``agrees``.
        dtrain: The remedy.
        shown: ``module:test`` of each test that shows it.
    """

    number: str
    what: str
    torch: str
    dtrain: str
    shown: tuple[str, ...]


SCENARIOS = (
    Scenario(
        "S00",
        "plain DDP, one rank overflows",
        "agrees",
        "the same",
        (
            f"{_HERE}.test_trainer:test_s00_plain_ddp_agrees_with_both_scalers",
            f"{_STEP}:test_ranks_skip_together_whoever_overflowed",
        ),
    ),
    Scenario(
        "S01",
        "a window whose last backward did not synchronise",
        "scales diverge",
        "the last backward of a window always synchronises; a model or task that prevents it is refused",
        (
            f"{_HERE}.test_trainer:test_s01_a_window_that_never_synchronised_diverges_with_any_scaler",
            f"{_HERE}.test_trainer:test_s01_the_last_backward_of_every_window_synchronises",
            "tests.training.test_checks:test_a_model_under_no_sync_is_refused",
            "tests.training.test_checks:test_a_task_that_goes_round_ddp_is_refused_in_its_first_step",
        ),
    ),
    Scenario(
        "S02",
        "parameters that DDP ignores, in the same optimizer; fused or not",
        "scales, step counts and weights diverge",
        "vote",
        (
            f"{_RANKS}:test_s02_parameters_outside_ddps_buckets",
            f"{_STEP}:test_ranks_skip_together_whoever_overflowed",
        ),
    ),
    Scenario(
        "S02c",
        "the same, with a schedule that is held back when the scale drops",
        "learning rates diverge",
        "vote; the trainer's schedules count applied steps",
        (
            f"{_HERE}.test_trainer:test_s02c_a_schedule_that_looks_at_the_scale_stays_in_step",
            f"{_STEP}:test_the_schedule_of_a_step_knows_the_outcome_of_the_one_before",
        ),
    ),
    Scenario(
        "S03",
        "two optimizers, of which the rank's own overflows",
        "scales diverge, then gradients of two scales are averaged",
        "vote",
        (f"{_RANKS}:test_s03_two_optimizers_of_which_the_ranks_own_overflows",),
    ),
    Scenario(
        "S04",
        "ZeroRedundancyOptimizer behind DDP",
        "agrees",
        "the same",
        (f"{_HERE}.test_sharded:test_s04_a_sharded_optimizer_behind_ddp_agrees_with_both_scalers",),
    ),
    Scenario(
        "S04u",
        "the same, with a module that DDP does not wrap",
        "hangs",
        "vote",
        (f"{_HERE}.test_sharded:test_s04u_a_module_outside_ddp_hangs_torch_and_is_one_skip_here",),
    ),
    Scenario(
        "S05",
        "gradients sharded after the backward (ZeRO-2)",
        "steps are torn: some shards move; weights are equal on all ranks, and wrong",
        "vote",
        (
            f"{_HERE}.test_sharded:test_s05_no_step_is_torn_into_shards_that_move_and_shards_that_do_not",
            f"{_RANKS}:test_s05_s07_dtensors_and_plain_tensors_in_one_optimizer",
        ),
    ),
    Scenario(
        "S06",
        "FSDP1 with a plain scaler; f: ShardedGradScaler and a fused optimizer; u: and unscale_",
        "diverges; f: diverges; u: crashes",
        "vote, with a flag of no dimension",
        (
            f"{_HERE}.test_sharded:test_s06_fsdp1_skips_together",
            f"{_HERE}.test_sharded:test_s06_torchs_scalers_diverge_or_crash_under_fsdp1",
        ),
    ),
    Scenario(
        "S07",
        "FSDP2; t: tensor parallelism with a sequence-parallel norm first",
        "agrees",
        "the same",
        (
            f"{_HERE}.test_sharded:test_s07_fsdp2_agrees_with_both_scalers",
            f"{_HERE}.test_sharded:test_s07t_tensor_parallel_with_a_norm_first_agrees_with_both_scalers",
        ),
    ),
    Scenario(
        "S07n",
        "tensor parallelism, a replicated gradient first (r: any DTensors)",
        "diverges, replicated weights included: its dispatch reduces over the first gradient's mesh only",
        "vote over local tensors",
        (
            f"{_HERE}.test_sharded:test_s07n_a_replicated_gradient_first_hides_the_others_from_torch_and_not_from_us",
            f"{_RANKS}:test_s07_torchs_dispatch_looks_at_the_first_placement_only",
        ),
    ),
    Scenario(
        "S07m",
        "DTensors and plain tensors in one optimizer",
        "crashes",
        "vote over local tensors",
        (
            f"{_RANKS}:test_s05_s07_dtensors_and_plain_tensors_in_one_optimizer",
            f"{_RANKS}:test_s07_torchs_dispatch_looks_at_the_first_placement_only",
        ),
    ),
    Scenario(
        "S08",
        "post-local SGD, overflow in the local phase",
        "scales and the averager's step diverge",
        "vote",
        (f"{_HERE}.test_hooks:test_s08_local_sgd_keeps_scale_and_averager_in_step",),
    ),
    Scenario(
        "S10h",
        "a hook that averages within pairs of ranks",
        "pairs diverge",
        "vote over all ranks",
        (f"{_HERE}.test_hooks:test_s10h_pairs_of_ranks_skip_with_the_others",),
    ),
    Scenario(
        "S11",
        "clipping by the norm of what a rank holds",
        "replicated weights diverge, without any overflow",
        "one norm, from the vote",
        (f"{_HERE}.test_trainer:test_s11_all_ranks_clip_by_one_norm",),
    ),
    Scenario(
        "S12",
        "a parameter unused on one rank, under find_unused_parameters",
        "agrees",
        "the same",
        (f"{_HERE}.test_trainer:test_s12_a_parameter_unused_on_one_rank_agrees_with_both_scalers",),
    ),
    Scenario(
        "S12l",
        "an optimizer whose parameters got no gradient on one rank (g: on all)",
        "an assertion on that rank only",
        "vote with a flag that is always there",
        (f"{_RANKS}:test_s12_an_optimizer_without_gradients_on_some_ranks_or_all",),
    ),
    Scenario(
        "S13",
        "a scaler's state that one rank loaded",
        "scales and weights diverge",
        "all ranks load rank 0's state",
        (
            f"{_HERE}.test_groups:test_s13_a_scale_that_one_rank_loaded_is_that_of_all",
            f"{_RANKS}:test_s13_a_state_on_rank_0_only_is_loaded_by_all",
            f"{_RANKS}:test_a_rank_that_loads_a_state_alone_fails_within_the_timeout",
        ),
    ),
    Scenario(
        "S14",
        "uneven inputs",
        "the rank with more inputs hangs; under Join the scales diverge",
        "the trainer gives every rank as many steps, and masks what is missing",
        (f"{_HERE}.test_trainer:test_s14_a_rank_with_fewer_samples_has_masked_rows_and_the_same_number_of_steps",),
    ),
    Scenario(
        "S15",
        "gradients all-reduced after unscaling, by hand",
        "diverges, with NaN",
        "vote",
        (f"{_RANKS}:test_s15_gradients_reduced_after_unscaling",),
    ),
    Scenario(
        "S16",
        "the reduction of the flags, fused",
        "SUM with two overflowing ranks, AVG and MIN step with NaN, on agreeing ranks",
        "a sum, then exactly 0.0 or 1.0",
        (
            f"{_HERE}.test_groups:test_s16_the_obvious_reductions_of_torchs_flags_step_with_nan",
            f"{_RANKS}:test_s16_two_overflowing_ranks_of_three_are_one_skip",
        ),
    ),
    Scenario(
        "S17",
        "fused SGD with momentum whose first step is skipped",
        "weights diverge: momentum starts from uninitialised memory",
        "momentum starts from zero",
        (
            f"{_HERE}.test_trainer:test_s17_fused_sgd_whose_first_step_is_skipped_starts_from_zero",
            "tests.precision.test_fused_optimizers:test_fused_sgd_first_step_overflow_leaves_momentum_zero",
            "tests.precision.test_fused_optimizers:test_torchs_scaler_trains_on_uninitialised_momentum",
            f"{_STEP}:test_a_skipped_step_leaves_no_trace",
        ),
    ),
    Scenario(
        "S18",
        "BatchNorm in a skipped forward",
        "its statistics stay infinite",
        "buffers are restored",
        (
            f"{_HERE}.test_trainer:test_s18_batchnorm_forgets_a_skipped_forward",
            f"{_STEP}:test_a_skipped_step_leaves_no_trace",
        ),
    ),
    Scenario(
        "S19",
        "two pipeline stages of two ranks",
        "diverges; so does a vote among the data-parallel ranks",
        "vote over all that share the scale",
        (
            f"{_HERE}.test_groups:test_s19_the_stages_of_a_pipeline_skip_together",
            f"{_HERE}.test_groups:test_s19_voting_among_the_data_parallel_ranks_is_not_enough",
        ),
    ),
    Scenario(
        "S20",
        "which rank, module and parameter it was",
        "after the all-reduce every rank shows the same gradients",
        "a streak of skips arms hooks on modules and local gradients",
        (
            f"{_HERE}.test_trainer:test_s20_after_the_all_reduce_every_rank_shows_the_same_gradients_so_hooks_look_before",
            "tests.precision.test_skip_diagnosis:"
            "test_one_bad_sample_on_one_rank_is_named_by_all_ranks_with_module_and_parameters_in_every_precision",
        ),
    ),
    Scenario(
        "S21",
        "one NaN sample in a run without a scaler",
        "all weights become NaN",
        "the same vote and skip with scaling off",
        (f"{_HERE}.test_trainer:test_s21_without_a_scaler_one_nan_is_one_skip",),
    ),
    Scenario(
        "S22",
        "fp16_compress_hook with a gradient whose mean fits",
        "infinite on all ranks; bf16_compress_hook refuses gloo",
        "gradients are divided before they are cast; bf16 on any backend",
        (
            "tests.precision.test_reduce_dtype:test_s22_a_mean_that_fits_fp16_arrives_where_torchs_hook_overflows",
            "tests.precision.test_reduce_dtype:test_s22_a_reduce_dtype_of_fp16_limits_the_scale_and_bf16_does_not",
        ),
    ),
    Scenario(
        "S23",
        "170 bad steps, then clean data",
        "the scale decays to zero, and then it steps with NaN",
        "a floor",
        (
            "tests.precision.test_grad_scaler:test_170_bad_steps_stop_at_the_floor_and_stay_finite",
            "tests.precision.test_grad_scaler:test_torchs_scale_decays_to_zero_and_then_steps_with_nan",
            f"{_STEP}:test_the_loss_scale_survives_170_bad_steps_and_the_run_goes_on",
        ),
    ),
    Scenario(
        "S25",
        "a maximum over ranks of values that may be NaN",
        "NaN is lost on every rank but the first",
        "0/1 flags are summed",
        (f"{_HERE}.test_groups:test_s25_a_maximum_loses_a_nan_and_a_sum_of_flags_does_not",),
    ),
    Scenario(
        "S26",
        "controls: accumulation under no_sync, unused parameters, static_graph",
        "agrees; a static graph under no_sync is an internal assertion",
        "the same; the first window of a static graph synchronises throughout",
        (
            f"{_HERE}.test_trainer:test_s26_an_overflow_in_the_micro_batch_that_is_not_synchronised_agrees_with_both_scalers",
            f"{_HERE}.test_trainer:test_s26_a_static_graph_accumulates_here_and_asserts_in_torch",
        ),
    ),
    Scenario(
        "S28",
        "skips in a row without end",
        "the run never ends",
        "all ranks stop at the same step with the same text",
        (
            f"{_STEP}:test_too_many_skips_end_all_ranks_at_the_same_step_with_the_same_text",
            "tests.precision.test_skip_diagnosis:"
            "test_an_infinity_born_in_the_backward_names_the_first_parameters_behind_it_in_every_precision",
        ),
    ),
)


def test_every_scenario_has_its_row() -> None:
    numbers = {int(scenario.number[1:3]) for scenario in SCENARIOS}
    assert numbers == set(range(29)) - {9, 24, 27}
    assert len({scenario.number for scenario in SCENARIOS}) == len(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.number)
def test_every_row_names_tests_that_exist(scenario: Scenario) -> None:
    assert scenario.shown
    for place in scenario.shown:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name, None)), place
