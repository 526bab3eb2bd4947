# A timer runs this as root every minute. It shuts the machine down after IDLE_MINUTES without work.

BUSY_LOAD=50  # hundredths: half a CPU core, over the last minute
BUSY_GPU=5    # per cent

# Prints what the machine is busy with; nothing if it is idle.
activity() {
    local load used
    [ -n "$(leading_processes)" ] && echo "a drivetrain process" && return
    [ -n "$(ss -Htn state established '( sport = :22 )' 2>/dev/null)" ] && echo "an SSH connection" && return
    load=$(cut -d ' ' -f 1 "$ROOT/proc/loadavg" | tr -d .)
    [ "$((10#$load))" -ge $BUSY_LOAD ] && echo "load" && return
    if [ "$USE_GPU" = true ]; then
        for used in $(nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits 2>/dev/null); do
            [[ $used =~ ^[0-9]+$ ]] && [ "$used" -ge $BUSY_GPU ] && echo "a GPU" && return
        done
    fi
}

# The time since the machine's start: the clock may be set meanwhile.
now=$(cut -d . -f 1 "$ROOT/proc/uptime")
mkdir -p "$ROOT/run"
since_file=$ROOT/run/drivetrain-idle-since # emptied by each start of the machine
since=$(cat "$since_file" 2>/dev/null)
if [ -n "$(activity)" ]; then
    rm -f "$since_file"
elif ! [[ $since =~ ^[0-9]+$ ]] || [ "$since" -gt "$now" ]; then
    echo "$now" >"$since_file"
elif [ $((now - since)) -ge $((IDLE_MINUTES * 60)) ]; then
    progress "idle for $(((now - since) / 60)) minutes: shutting down. The disk stays"
    shutdown -h now
fi
