# Google's guest agent runs this as root at each start of the machine. It prepares the machine for drivetrain, which needs at most one
# restart, for the GPU's driver. What is done already is not done again. Progress: `drivetrain: ...` on the serial console and in
# /var/log/drivetrain-startup.log. At the end /var/lib/drivetrain/ready exists, with the ID of this start of the machine.

set -u
DRIVER_BRANCH=580 # NVIDIA supports it until June 2028; it is the last one for V100, P100 and P4
ATTEMPTS=${DRIVETRAIN_ATTEMPTS:-4}
PAUSE_SECONDS=${DRIVETRAIN_PAUSE_SECONDS:-20}
CUDA_KEYRING=https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb
TOOLKIT=https://nvidia.github.io/libnvidia-container
LOG=$ROOT/var/log/drivetrain-startup.log
OUTPUT=$STATE/step-output
export DEBIAN_FRONTEND=noninteractive

# --- steps -------------------------------------------------------------------------------------

# Runs a step, several times if it fails: most failures are the network's. The last line of its output is the reason.
step() { # FUNCTION TEXT
    local attempt reason
    for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
        progress "$2"
        "$1" >"$OUTPUT" 2>&1
        local code=$?
        cat "$OUTPUT" >>"$LOG"
        [ $code = 0 ] && return
        reason=$(grep -a '^E: ' "$OUTPUT" | tail -n 1)
        [ -n "$reason" ] || reason=$(grep -av '^[[:space:]]*$' "$OUTPUT" | tail -n 1)
        reason=${reason:-code $code}
        [ "$attempt" = "$ATTEMPTS" ] && break
        progress "$2: attempt $attempt of $ATTEMPTS failed: $reason"
        sleep "$PAUSE_SECONDS"
    done
    fail "$2: $reason"
}

fail() {
    printf '%s\n' "$*" >"$STATE/failed"
    progress "failed: $*"
    exit 1
}

is_installed() { # PACKAGE...
    local package
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || return 1
    done
}

# The package manager, which waits for other users of its lock, such as the system's own updates.
apt() {
    apt-get -q -y -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3 "$@"
}

fetch() { # URL FILE
    mkdir -p "$(dirname "$2")"
    curl -fsSL --retry 3 --connect-timeout 20 -o "$2.part" "$1" && mv "$2.part" "$2"
}

install_idle_timer() {
    local program=$ROOT/usr/local/sbin/drivetrain-idle units=$ROOT/etc/systemd/system
    if [ "$IDLE_MINUTES" = 0 ]; then
        [ -e "$units/drivetrain-idle.timer" ] || return 0
        systemctl disable --now drivetrain-idle.timer && rm -f "$units/drivetrain-idle.timer" "$units/drivetrain-idle.service"
        return
    fi
    mkdir -p "$(dirname "$program")" "$units"
    base64 -d <<<"$IDLE_SCRIPT" >"$program" && chmod 755 "$program" || return
    printf '[Unit]\nDescription=Shuts this machine down when it is idle\n[Service]\nType=oneshot\nExecStart=/usr/local/sbin/drivetrain-idle\n' \
        >"$units/drivetrain-idle.service"
    printf '[Timer]\nOnBootSec=2min\nOnUnitActiveSec=1min\n[Install]\nWantedBy=timers.target\n' >"$units/drivetrain-idle.timer"
    systemctl daemon-reload && systemctl enable --now drivetrain-idle.timer
}

# Processes of SSH sessions get SIGTERM from the system at the same time as save.sh runs: without this, a run's workers would end with its
# supervisor. The order of stops is the reverse one.
let_runs_save_first() {
    local folder=$ROOT/etc/systemd/system/session-.scope.d
    mkdir -p "$folder" && printf '[Unit]\nBefore=google-shutdown-scripts.service\n' >"$folder/drivetrain.conf" && systemctl daemon-reload
}

install_packages() {
    dpkg --configure -a || return # the machine may have been stopped in the middle of an installation
    is_installed python3-venv rsync curl ca-certificates gnupg git docker.io && return
    apt update && apt install --no-install-recommends python3-venv rsync curl ca-certificates gnupg git docker.io
}

create_user() {
    id "$SSH_USER" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$SSH_USER" || return
    usermod -aG docker "$SSH_USER"
}

has_gpu_device() {
    grep -qi 0x10de "$ROOT"/sys/bus/pci/devices/*/vendor 2>/dev/null || {
        echo "no NVIDIA GPU is attached to this machine"
        return 1
    }
}

# The newest kernel comes with its headers, so that the driver is built for the kernel that runs after the restart.
install_driver() {
    has_gpu_device || return
    is_installed cuda-drivers && return
    if ! is_installed cuda-keyring; then
        fetch "$CUDA_KEYRING" "$STATE/cuda-keyring.deb" && dpkg -i "$STATE/cuda-keyring.deb" || return
    fi
    apt update && apt install --no-install-recommends linux-image-cloud-amd64 linux-headers-cloud-amd64 dkms gcc make &&
        apt install "nvidia-driver-pinning-$DRIVER_BRANCH" && apt install cuda-drivers
}

count_gpus() {
    nvidia-smi --list-gpus | grep -c '^GPU '
}

# Restarts the machine once, if the driver does not work yet.
load_driver() {
    [ "$(count_gpus 2>/dev/null)" -ge 1 ] && return
    if [ ! -e "$STATE/restarted" ]; then
        date -u >"$STATE/restarted"
        progress "restarting once, to load the GPU's driver"
        sync
        shutdown -r now
        exit 0
    fi
}

check_gpus() {
    local num_gpus
    num_gpus=$(count_gpus)
    [ "$num_gpus" = "$NUM_GPUS" ] && return
    nvidia-smi
    echo "nvidia-smi shows $num_gpus GPUs instead of $NUM_GPUS, after the restart for the driver: $(nvidia-smi 2>&1 | grep -av '^[[:space:]]*$' | head -n 1)"
    return 1
}

install_container_toolkit() {
    local key=$ROOT/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg list=$ROOT/etc/apt/sources.list.d/nvidia-container-toolkit.list
    if ! is_installed nvidia-container-toolkit; then
        fetch "$TOOLKIT/gpgkey" "$STATE/toolkit-key" && gpg --batch --yes --dearmor -o "$key" "$STATE/toolkit-key" || return
        fetch "$TOOLKIT/stable/deb/nvidia-container-toolkit.list" "$STATE/toolkit-list" || return
        mkdir -p "$(dirname "$list")"
        sed 's#deb https://#deb [signed-by=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg] https://#' "$STATE/toolkit-list" >"$list"
        apt update && apt install nvidia-container-toolkit || return
    fi
    [ -e "$STATE/docker-configured" ] && return
    nvidia-ctk runtime configure --runtime=docker && systemctl restart docker && touch "$STATE/docker-configured"
}

# --- what runs at each start -------------------------------------------------------------------

mkdir -p "$STATE"
rm -f "$STATE/ready"
progress "preparing this machine"
if [ -e "$STATE/failed" ]; then
    progress "the last start failed: $(cat "$STATE/failed")"
    rm -f "$STATE/failed"
fi

step install_idle_timer "shutdown after $IDLE_MINUTES idle minutes (0: never)" # first: a machine that cannot be prepared must not run forever
step let_runs_save_first "order of the shutdown"
step install_packages "packages"
step create_user "user $SSH_USER"
if [ "$USE_GPU" = true ]; then
    step install_driver "the GPU's driver (some minutes)"
    load_driver
    step check_gpus "checking the GPUs"
    step install_container_toolkit "container toolkit"
fi

cat "$ROOT/proc/sys/kernel/random/boot_id" >"$STATE/ready" 2>/dev/null || touch "$STATE/ready"
progress "ready"
