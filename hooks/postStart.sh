#!/bin/sh
# Writes to postStart.log when this container started. Nothing depends on it.
#
# It may run before or after the start of the trainer, so it never touches the signal
# file. It always exits with 0, since Kubernetes kills a container whose postStart fails.
#
# MIGRATOR_HOOK_LOGS   directory of postStart.log (else that of MIGRATION_CKPT_PATH,
#                      else MIGRATOR_CKPT if it is a directory, else the signal file's)
set -u
LC_ALL=C
export LC_ALL

signal=${MIGRATOR_SIGNAL:-${MIGRATION_SIGNAL_PATH:-/tmp/migrator/signal}}
case $signal in /*) ;; *) signal=./$signal ;; esac
signal_dir=${signal%/*}
signal_dir=${signal_dir:-/}

log_dir() { # -> $logs
    if [ -n "${MIGRATOR_HOOK_LOGS:-}" ]; then
        logs=$MIGRATOR_HOOK_LOGS
    elif [ -n "${MIGRATION_CKPT_PATH:-}" ]; then
        case $MIGRATION_CKPT_PATH in */*) logs=${MIGRATION_CKPT_PATH%/*} ;; *) logs=. ;; esac
        logs=${logs:-/}
    else
        case ${MIGRATOR_CKPT:-} in '' | *://*) logs=$signal_dir ;; *) logs=$MIGRATOR_CKPT ;; esac
    fi
    case $logs in /*) ;; *) logs=./$logs ;; esac
}

{ read -r host </proc/sys/kernel/hostname; } 2>/dev/null || host=unknown
log_dir
if ! {
    mkdir -p "$logs" &&
        printf 'start: %s %s\n' "$(date '+%a %b %e %H:%M:%S %Z %Y')" "$host" >>"$logs/postStart.log"
} 2>/dev/null; then
    printf 'postStart: cannot write %s: name a directory that can be written in MIGRATOR_HOOK_LOGS\n' \
        "$logs/postStart.log" >&2
fi
exit 0
