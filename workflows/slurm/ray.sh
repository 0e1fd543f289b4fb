# Ray for a Slurm job. The scripts of this folder source this file.
# shellcheck shell=bash

# Start Ray on all nodes of the job, run a command in this shell, and end Ray. Returns the status of the command.
#
# SIGTERM goes on to the command alone, which saves a checkpoint and ends. It comes to this shell some time before the limit
# (`#SBATCH --signal`), and to the steps when Slurm preempts the job and GraceTime begins. Then the job goes back into the queue,
# where the same command continues it. Slurm itself does not requeue a job at its time limit, nor one that ends in GraceTime.
run_with_ray() {
    local command='' stopped='' status=1 others=$((SLURM_NNODES - 1)) job=$SLURM_JOB_ID scratch=${SLURM_TMPDIR:-/tmp} address end
    local -x SLURM_TIME_FORMAT=standard
    command -v ray > /dev/null || { echo "error: there is no command ray; change the line with PATH" >&2; return 2; }
    trap 'stopped=yes; [[ -z $command ]] || kill -TERM "$command"' TERM

    # The number of one job of an array is also that of the whole array.
    [[ -z ${SLURM_ARRAY_JOB_ID-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

    # A folder on the disk of each node. Ray has sockets in it, and the path of a socket has 107 characters at most.
    ((${#scratch} <= 24)) || scratch=/tmp
    RAY_FOLDER=$(mktemp -d "$scratch/ray-XXXXXX") || return
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_FOLDER RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_SLURM_JOB=$job RAY_SLURM_SHELL=$BASHPID
    export -f ray_on_node signalled end_tree job_runs job_says

    srun --export=ALL --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$SLURMD_NODENAME" \
        bash -c 'ray_on_node "$@"' bash head --head --port=0 --ray-client-server-port=$((10000 + SLURM_JOB_ID % 10000)) \
        --include-dashboard=false --disable-usage-stats &
    address=$RAY_FOLDER/head/ray_current_cluster
    until [[ -s $address || $stopped ]] || ! kill -0 $! 2> /dev/null; do sleep 1; done
    if [[ -s $address && ! $stopped ]]; then
        RAY_ADDRESS=$(< "$address")
        export RAY_ADDRESS
        if ((others)); then
            srun --export=ALL --nodes=$others --ntasks=$others --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" \
                --kill-on-bad-exit=0 bash -c 'ray_on_node "$@"' bash worker --address="$RAY_ADDRESS" &
        fi
        "$@" &
        command=$!
        if [[ $stopped ]]; then kill -TERM "$command"; else wait "$command"; fi  # SIGTERM may have come just before
        end=$(job_says EndTime)  # of GraceTime, or of the job
        while kill -0 "$command" 2> /dev/null; do  # SIGTERM ended the wait
            sleep 1
            if [[ $end == *T* ]] && (($(date +%s) + 5 >= $(date --date="$end" +%s))); then
                end=''
                echo "warning: the command did not end after SIGTERM; its next start continues from the last checkpoint" >&2
                scontrol requeue "$job" && kill -KILL "$command"
            fi
        done
        wait "$command"; status=$?  # of the command: a wait that SIGTERM ends has the status 143
    fi

    trap '' TERM
    while [[ $(jobs -pr) ]]; do  # a step that has not begun misses the signal
        scancel --signal=USR1 "$job" 2> /dev/null  # a job that a user cancelled has no steps any more
        sleep 1
    done
    # In such a job, srun killed the shells of its steps before they could do this.
    until rm -rf "$RAY_FOLDER"; do sleep 1; done 2> /dev/null
    # Only if SIGTERM ended the command, or Slurm needs the nodes for another job; and not in a job that a user cancelled.
    if ((status)) && job_runs; then
        if [[ $(job_says PreemptTime) == *T* || ($stopped && $status == 143) ]]; then
            scontrol requeue "$job"
        elif [[ $stopped && -z $command ]]; then
            echo "error: SIGTERM came before Ray had started; give the job more time" >&2
        fi
    fi
    return "$status"
}

# Return whether nothing has ended the job so far. Slurm calls it SIGNALING for a moment while it sends a signal.
job_runs() {
    [[ $(job_says State) =~ ^(RUNNING|SIGNALING)\  ]]
}

job_says() {
    squeue --noheader --Format="$1" --jobs="$RAY_SLURM_JOB"
}

# Run `ray start` on this node until SIGUSR1. It is tried five times, because Ray gives its agents only 15 seconds to start.
# Arguments: head or worker, and options.
ray_on_node() {
    local folder=$RAY_FOLDER/$1 ended='' ray=''
    # With proctrack/linuxproc, Slurm sends SIGTERM to all processes of a step. So those of Ray block it.
    local without_sigterm='import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); os.execvp(sys.argv[1], sys.argv[1:])'
    shift
    [[ -O $RAY_FOLDER ]] || mkdir -m 700 "$RAY_FOLDER" || return
    trap 'ended=yes; end_tree "$ray"' USR1
    trap signalled TERM
    for _ in {1..5}; do
        # Ray chooses free ports, except for two, whose defaults would be the same for all jobs on a node.
        python3 -c "$without_sigterm" \
            ray start "$@" --block --temp-dir="$folder" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
            --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=$((20000 + SLURM_JOB_ID % 10000)) \
            > "$folder.log" 2>&1 &
        ray=$!
        while wait "$ray"; kill -0 "$ray"; do :; done 2> /dev/null  # without bash's line about a killed process
        if [[ $ended ]] || ! job_runs; then break; fi
        echo "Ray ended on $SLURMD_NODENAME:" >&2
        tail -n 5 "$folder.log" >&2
    done
    trap '' TERM USR1
    until rm -rf "$folder" "$folder.log"; do sleep 1; done 2> /dev/null
    rmdir "$RAY_FOLDER" 2> /dev/null || true  # another node of this machine may use it
}

# After SIGTERM to the step of `ray_on_node`: end Ray only if the job ends, as after `scancel`; else tell the shell of the script.
signalled() {
    if ! job_runs; then
        end_tree "$ray"
    elif [[ $folder == */head ]]; then
        kill -TERM "$RAY_SLURM_SHELL"
    fi
}

# Kill a process and all below it. Those of Ray would wait for each other, and some leave the step when their parent ends.
end_tree() {
    local child children
    children=$(pgrep -P "$1")
    kill -KILL "$1"
    for child in $children; do end_tree "$child"; done
} 2> /dev/null
