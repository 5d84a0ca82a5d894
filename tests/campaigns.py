"""What `make test-all` runs besides: tests that take long and ask what a quicker one asks too, of more or in full.

A pattern of a test's id -> which quicker test stays. Measured by pytest's --durations on two cores.
"""

import re

CAMPAIGNS = {
    # The command that measures is research: the kit's own tests hold what it leans on.
    r"benchmarks/(?!test_bad_inputs|test_benchmark_faults|test_benchmark_page)": "the rooms' own",
    r"benchmarks/test_benchmark_faults.*struck.*\[(?!kill, full|press, ep|damage, LoRA|file)": "one of each kind",
    # The whole card, twice; the one without Triton stays, and the card's rules without a card.
    r"test_on_a_pretend_card\[(rtx4090|t4)": "without_triton, test_cuda_card.py",
    # Notebooks beside the first course.
    r"test_runs_from_top_to_bottom.*\[(?!0[0124567]_|12_)": "00, 01, 02, 04, 05, 06, 07, 12",
    r"test_every_number_of_the_run_folder_is_there_once\[tensorboard": "trackio, wandb",
    r"test_a_script_is_one_of_trls|test_a_script_samples_by_the_engine": "test_a_script_runs_in_the_loop",
    r"test_flex_attention_scores_as_each_row_alone\[(?!olmo3)": "olmo3",
    r"test_the_plan_of_gpu24_is_within_a_tenth.*case[1-9]": "case0",
    r"test_three_doors.*(script\]|goes_on|red_flag|test_trl_trains)": "the three doors, test_loop_processes.py",
    r"test_wheel.*(notebook|sdist|core_is_all|pip_cannot|every_module)": "the command line, README's example",
    r"export/test_faults.*(full_on_the_way|killed_at_any)": "no room; a killed export's leftovers",
    r"test_plain_peft_opens.*\[resized": "a folder",
    r"test_an_error_of_a_reward_is_its_message_first": "test_loop_scores.py",
    r"test_two_processes_end_in_the_weights_of_one\[options[12]": "the first",
    r"test_the_first_steps_are_todays": "test_every_loss_and_gradient_is_trls",
    r"test_whoever_reads_no_reply_scores_no_more": "the other games' cheats",
    r"test_card_of_a_run_and_its_way_to_the_hub": "the model card's own tests",
    r"test_reward_cost.*prints_and_saves": "its parts",
    r"test_wheel.*without_its_weights": "the error's own test",
    r"test_two_processes_train_the_weights_of_one": "test_loop_processes.py",
    r"test_a_drawn_fault_ends_equal_or_in_words\[[2-7]": "two seeds",
    r"test_a_saved_notebook_keeps_one_picture.*nbclient": "papermill",
    r"test_older_weights.*(new_process|episodes_wait|a_stop_while|each_step_dropped|one_object)": "the loop's stops",
    r"test_in_a_kernel_chart_and_browser_follow": "test_panel.py in a kernel",
}


def is_campaign(test_id: str) -> bool:
    return any(re.search(pattern, test_id) for pattern in CAMPAIGNS)
