"""The command `dkm`: everything that a user of the library alone does not need.

cli          the entry point;  commands: a file for each command;  screen: what they look like in a terminal
settings     every setting of a run, with its default, limits and explanation
places       settings that mean the same in every working directory
models       models by their names;  checkpoint_files: weights from files;  own_code: functions in the user's files
tasks        the kinds of data: one file for each
run_folder   the folder of a run: its files and the types of what they hold
report       the page and the summary, made from a run folder
run          the run itself: evaluation, training, checkpoints, result
demo         something to compress for a user who has nothing at hand
processes    whether a launcher has started several processes
errors       what the command shows as one sentence
"""
