"""The cases that `make test` runs of tests that try many: all other cases of these tests are marked `slow`.

A whole test that only `make test-all` runs has the mark itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

#: Tests by their path, without `tests/`, each with the ids of its quick cases.
QUICK: Mapping[str, Sequence[str]] = {
    "checkpoint/test_resume.py::test_it_ends_with_the_same_bits_and_the_same_points": [
        "mirrored-stops3",
    ],
    "checkpoint/test_resume.py::test_a_run_goes_on_under_another_strategy": ["mirrored"],
    "conf/test_recipes.py::test_a_recipe_trains_validates_and_tests": ["custom_step", "model_parallel"],
    "dataset/test_varying.py::test_random_changes_are_new_in_each_epoch": ["map"],
    "hydra_plugins/test_optuna5.py::test_our_own_jobs_are_stopped_where_they_do_worse": ["isolated"],
    "hydra_plugins/test_optuna5.py::test_the_search_and_the_report_agree_on_what_is_better": ["words1-1"],
    "hydra_plugins/test_optuna5.py::test_a_value_that_is_proposed_twice_runs_once_and_is_told_twice": ["n_jobs=4"],
    "model/test_export.py::test_both_forms_do_what_the_trained_model_does": ["float32-1e-05"],
    "objective/test_metrics.py::test_metrics_on_two_replicas_are_keras_s_of_the_whole": ["classification"],
    "optimizer/test_fine_tuning.py::test_averages_resume_bit_for_bit": ["float32"],
    "optimizer/test_fine_tuning.py::test_rate_factors_and_averages_are_the_same_on_every_strategy": ["mirrored"],
    "strategy/test_pipeline_parallelism.py::test_float32_equals_one_device": ["mlp"],
    "strategy/test_remat.py::test_losses_and_states_are_the_same": ["accumulated"],
    "strategy/test_structures.py::test_processes_give_the_losses_and_metrics_of_one_device": [
        "multi_worker-everything-more0"
    ],
    "strategy/test_tpu.py::test_xla_compiles_a_step_of_the_loop": ["float32-1"],
    "test_cli.py::test_an_answer_imports_nothing_heavy": ["--cfg job", "strategy=miror"],
    "test_cli.py::test_python_m_imports_nothing_heavy_either": ["--help"],
    "test_cli.py::test_ctrl_c_during_the_imports_ends_the_command_in_a_line": ["scaleflow "],
    "test_cli.py::test_a_closed_standard_output_ends_an_answer_quietly": [
        "scaleflow --help-",
        "scaleflow sync --help-",
    ],
    "objective/test_page.py::test_a_command_with_own_code_trains": ["loss"],
    "test_extend.py::test_a_command_trains": ["model=houses"],
    "test_matrix.py::test_the_default_job_reaches_the_promised_accuracy": [
        "mirrored-mixed_bfloat16",
    ],
    "training/test_equality.py::test_float32_equals_one_device": ["adam"],
    "training/test_equality.py::test_mixed_precision_equals_one_device_within_its_rounding": ["mixed_float16"],
    "training/test_fit.py::test_fit_trains_as_the_loop_does": ["mirrored"],
    "training/test_loop.py::test_special_models_train_the_same_however_divided": ["active, bfloat16"],
    "training/test_loop.py::test_every_digit_counts_once_in_an_evaluation": ["2"],
    "training/test_loop.py::test_nothing_is_traced_again_after_the_first_call": ["2"],
    "training/test_loop.py::test_models_with_dropout_and_batch_norm_train": ["2"],
    "training/test_loop.py::test_a_loss_that_is_not_finite_is_named_by_its_step": ["2-accumulates1-calls1"],
    "training/test_loop.py::test_an_update_is_the_mean_over_the_examples_that_are_there": ["2-3"],
    "training/test_loop.py::test_a_stream_trains_like_the_same_examples_in_memory": ["2-2"],
    "training/test_networks.py::test_each_network_can_be_cut_into_stages": ["text"],
    "training/test_decisions.py::test_a_rate_that_was_too_high_ends_well": ["mirrored cosine"],
    "training/test_decisions.py::test_it_goes_on_from_the_checkpoint_with_the_same_data_and_half_the_rate": [
        "constant"
    ],
    "training/test_row_gradients.py::test_updates_by_rows_equal_updates_of_the_whole_table": [
        "Adagrad strategy=mirrored hardware.logical_devices=2 training.accumulate=2 training.clip_norm=0.05",
    ],
    "training/test_row_gradients.py::test_training_by_rows_resumes_bit_for_bit": ["LazyAdam"],
    "training/test_row_gradients.py::test_a_step_computes_nothing_of_the_size_of_the_table": ["Adagrad"],
    "training/test_own_step.py::test_two_replicas_train_as_one_device_does": ["two rates"],
    "training/test_targets.py::test_a_kind_of_target_trains_and_its_values_are_numpys": ["multi_label-3"],
    "training/test_xla.py::test_a_run_compiled_with_xla_is_the_same_run": [
        "mlp accumulated and clipped-one_device",
    ],
    "features/warm/test_warm.py::test_signals_reach_the_command": ["SIGINT"],
}


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Marks what `QUICK` leaves out.

    Raises:
        pytest.UsageError: if the table names a case that a collected test does not have.
    """
    wanted = {(name, case) for name, cases in QUICK.items() for case in cases}
    seen: set[str] = set()
    for item in items:
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        if name in QUICK:
            seen.add(name)
            if case.removesuffix("]") not in QUICK[name]:
                item.add_marker(pytest.mark.slow)
            wanted.discard((name, case.removesuffix("]")))
    missing = sorted(f"{name}[{case}]" for name, case in wanted if name in seen)
    if missing:
        raise pytest.UsageError(f"tests/tiers.py names cases that there are not: {', '.join(missing)}")
