"""The attacks of the third review: what each must come to, and which tests say so in our own words.

The programs lie in a folder that `DPBENCH_CASES` names, beside the checkout in our workplace and not in the repository;
`make test-long` runs them where they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.refusals import all_tests

ROOT = Path(__file__).parents[2]
COUPLED = "tests/guards/test_coupled_steps.py::test_coupled_steps_are_not_separable"
IN_A_LOOP = "tests/strategies/test_coupling.py::test_a_loop_is_watched_alike"
MOVES_MORE = (
    r"distance in lot 5: +(1\.0[2-9]|1\.[1-9]|[2-9]|\d\d)"  # than the bound: coupled records are run one by one
)


class Attack(NamedTuple):
    """What a program must come to.

    Attributes:
        tests: Ours of the same kind.
        shown: Patterns of its output, errors included.
        hidden: Patterns that its output must not have.
        words: Its arguments.
    """

    tests: tuple[str, ...]
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


ATTACKS: dict[str, Attack] = {
    "c01_probe_extreme_record.py": Attack(
        (COUPLED, IN_A_LOOP),
        ("Plain +accepted 6 of 6", "MaxNormalized +accepted 6 of 6", "ClampMean .*distance in lot 5"),
        (MOVES_MORE,),
    ),
    "c02_probe_only_32.py": Attack((COUPLED,), ("Batch64 .*distance in lot 5",), (MOVES_MORE,)),
    "c03_tail_of_pure_noise.py": Attack(
        ("tests/privacy/test_tails.py::test_what_samplers_of_24_bits_leave_uncovered",),
        (r"largest \|z\| of 4e\+08: (5\.[89]|[6-9])",),
    ),
    "c05_low_bits_of_weights.py": Attack(
        ("tests/privacy/test_noise.py::test_low_bits_do_not_tell_a_sum_from_zero",),
        ("without it +" + re.escape("[") + "[1-9]",),  # as many with the record as without
    ),
    "c06_dropout_seed_32_bits.py": Attack(
        ("tests/callback/test_local_randomness.py::test_a_step_draws_by_its_whole_seed",),
        (r"\d of 10 right",),  # by chance
        ("10 of 10 right",),
    ),
    "c07_same_noise_for_edited_file.py": Attack(
        (
            "tests/callback/test_run_key.py::test_runs_of_one_seed_that_differ_share_neither_noise_nor_lots",
            "tests/callback/test_run_key.py::test_one_edited_record_does_not_stand_bare_between_two_models",
        ),
        (r"noise_source \['(\w+)', '(?!\1)",),
    ),
    "c08_split_depends_on_everybody.py": Attack(
        (
            "tests/capabilities/own_data/test_held_out.py::test_a_user_more_moves_no_other",
            "tests/data/test_held_out.py::test_an_image_less_moves_no_other",
        ),
        ("user zzz: 0 OTHER", "user aaa: 0 OTHER", "5001 records: [01] records differ"),
    ),
    "c09_strangers_folder.sh": Attack(
        (
            "tests/harness/run/test_strangers_folder.py::test_no_command_unpickles_what_a_checkpoint_holds",
            "tests/harness/run/test_strangers_folder.py::test_no_class_is_imported_from_the_folder",
        ),
        ("pickle: +dpbench export",),
        ("PICKLE-EXECUTED", "MODULE-IMPORTED"),
    ),
    "c12_networks.py": Attack(
        ("tests/guards/test_healthy_steps.py::test_healthy_steps_are_separable_or_run_record_by_record",),
        (r"bf16-mixed conv +worst 1\.0000",),
        ("VIOLATION",),
    ),
    "c16_optimizer_reads_loss.py": Attack(
        ("tests/strategies/test_optimizers.py::test_an_optimizer_that_reads_the_loss_is_refused",),
        ("the optimizer reads the loss of a batch",),
    ),
    "c17_hparams.py": Attack(
        ("tests/guards/test_saved_values.py::test_a_step_writes_nothing_that_is_saved",), ("hparams",), ()
    ),
    "c19_planted_kernels.sh": Attack(
        ("tests/privacy/test_native.py::test_known_answers_find_what_is_wrong",),
        (r"nobody.*kernels\.so", "test accuracy"),
        (r"accuracy +[3-9]\d\.",),  # 83 % without noise at epsilon 0.2
    ),
    "c20_fallback_items.py": Attack(
        (
            "tests/data/test_fetching.py::test_an_item_in_the_place_of_another_is_refused",
            "tests/data/test_fetching.py::test_a_lot_filled_up_with_an_item_of_its_own",
        ),
        ("in the place of item",),
    ),
    "c21_optimizer_state.py": Attack(
        ("tests/guards/test_saved_values.py::test_a_step_writes_nothing_that_is_saved",), (r"optimizer\.state",)
    ),
    "c23_truncated_audit.py": Attack(
        ("tests/capabilities/canaries/test_training.py::test_lots_of_a_chosen_largest_size_are_audited_as_such",),
        (),
        ("max_batch_size=88",),
    ),
    "c24_timing.py": Attack(()),  # a text: docs/guarantee.md, and a line at the start of a training by user
    "c25_loop.py": Attack((COUPLED, IN_A_LOOP), ("accepted, epsilon",)),
    "c26_accumulated_noise.py": Attack(  # imports a program that is kept back
        ("tests/capabilities/auditing/test_fresh.py::test_each_fault_is_found_by_the_test_that_is_due",),
    ),
}
OTHERS = {"common.py", "remedy_probe.py"}  # parts of programs


def programs() -> Path:
    folder = os.environ.get("DPBENCH_CASES")
    if folder is None:
        pytest.skip("needs $DPBENCH_CASES")
    return Path(folder)


def test_every_attack_has_tests_of_its_kind() -> None:
    there = all_tests()
    for name, attack in ATTACKS.items():
        assert set(attack.tests) <= there, name
        assert attack.tests or name == "c24_timing.py"


def test_every_program_is_listed() -> None:
    names = {path.name for path in programs().iterdir() if path.is_file()}
    assert names - OTHERS == set(ATTACKS)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.shown or attack.hidden])
def test_programs_come_to_what_they_must(name: str) -> None:
    folder, attack = programs(), ATTACKS[name]
    command = ["bash"] if name.endswith(".sh") else [sys.executable]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [*command, str(folder / name), *attack.words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    output = done.stdout + done.stderr
    for pattern in attack.shown:
        assert re.search(pattern, output), f"{name}: {pattern}\n{output[-2000:]}"
    for pattern in attack.hidden:
        assert not re.search(pattern, output), f"{name}: {pattern}\n{output[-2000:]}"
