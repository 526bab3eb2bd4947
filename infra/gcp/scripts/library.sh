# What the scripts of a machine share. Terraform joins it with the settings above and one of the scripts below.
# Tests set DRIVETRAIN_ROOT to a folder that stands for the machine's disk, /proc and /sys.

ROOT=${DRIVETRAIN_ROOT:-}
STATE=$ROOT/var/lib/drivetrain

# Writes a line to the log, and to the serial console, which can be read without SSH.
progress() {
    local line="drivetrain: $*" console=$ROOT/dev/ttyS0
    mkdir -p "$ROOT/var/log"
    printf '%s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$line" >>"$ROOT/var/log/drivetrain-startup.log"
    [ -w "$console" ] && printf '%s\r\n' "$line" >>"$console"
    return 0
}

# Is this process a drivetrain command, or part of a job that drivetrain started here?
is_drivetrain() {
    local words number
    tr '\0' '\n' 2>/dev/null <"$ROOT/proc/$1/environ" | grep -q '^DRIVETRAIN_JOB=' && return 0
    mapfile -d '' -t words 2>/dev/null <"$ROOT/proc/$1/cmdline" || return 1
    case "${words[0]-}" in
        drivetrain | */drivetrain) return 0 ;;
        python* | */python*) ;;
        *) return 1 ;;
    esac
    [[ ${words[1]-} == */drivetrain ]] && return 0
    for ((number = 1; number + 1 < ${#words[@]}; number++)); do # also python torchrun ... -m drivetrain
        [ "${words[number]}" = -m ] && [ "${words[number + 1]}" = drivetrain ] && return 0
    done
    return 1
}

# Prints the process IDs of drivetrain's processes that no other one of them has started: supervisors of jobs, and commands.
leading_processes() {
    local folder pid parent
    for folder in "$ROOT"/proc/[0-9]*; do
        pid=${folder##*/}
        is_drivetrain "$pid" 2>/dev/null || continue
        parent=$(sed -n 's/^PPid:[[:space:]]*//p' "$folder/status" 2>/dev/null)
        [ -n "$parent" ] || continue # it has ended meanwhile
        is_drivetrain "$parent" 2>/dev/null || echo "$pid"
    done
}
