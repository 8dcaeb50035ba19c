#!/bin/bash
# Starts the workers of a sweep. Written by `python -m trainer sweep --launcher=slurm`.
@options

trap 'interrupted=1; kill -s USR1 "$worker"' USR1
trap 'interrupted=1' TERM

# In a subshell, so that the setup changes nothing of what follows, such as the PATH. The empty line
# ends a setup whose last line ends with a backslash.
(
@path
@setup

cd -- @here && exec @command
) </dev/null &
worker=$!

# A trapped signal ends wait, but not the worker.
interrupted=1
while [ "$interrupted" ]; do
    interrupted=
    wait "$worker"
    code=$?
done

# 138 and 143: SIGUSR1 or SIGTERM came before the worker could handle it.
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
case $code in 75 | 138 | 143)
    case $(squeue --noheader --states=all --jobs="$task" --format=%T/%r) in
    RUNNING/* | */TimeLimit)
        echo "The worker was stopped (exit code $code); requeueing task $task."
        scontrol requeue "$task"
    esac
esac
exit $code
