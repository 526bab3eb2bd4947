# Google's guest agent runs this as root when the machine is preempted, stopped or restarted. It asks drivetrain's runs to save, and
# waits for them as long as Google grants.

rm -f "$STATE/ready"
pids=$(leading_processes)
[ -n "$pids" ] || exit 0
progress "shutting down: asking $(wc -w <<<"$pids") runs to save"
# shellcheck disable=SC2086  # a list of numbers
kill -TERM $pids 2>/dev/null

deadline=$((SECONDS + SAVE_SECONDS))
while [ $SECONDS -lt $deadline ]; do
    remaining=""
    for pid in $pids; do
        is_drivetrain "$pid" 2>/dev/null && remaining="$remaining $pid"
    done
    if [ -z "$remaining" ]; then
        progress "all runs have saved"
        sync
        exit 0
    fi
    sleep 0.2
done
progress "still saving after $SAVE_SECONDS s:$remaining. They resume from their last complete checkpoint"
sync
