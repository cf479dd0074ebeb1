#!/bin/sh
# Asks the trainer in this container to save, and waits until the ckpt is saved.
#
# Kubernetes runs this before it stops the container. The grace has begun when
# this starts, and SIGTERM is sent only when this has ended. So it never waits
# past the grace, and ends as soon as the trainer has answered.
#
#   exit 0   saved: the ckpt exists
#        3   no trainer to ask: none listens yet, or it finished by itself
#        4   the trainer died before it answered
#        5   no answer before the deadline
#        6   the trainer answered that it could not save
#        7   the signal file cannot be read or written
#        8   saved, but a later life of the job goes on without it
#
# The reason is written to stderr, from where kubelet copies it into the pod's
# events, and to preStop.log, which also has the progress of a long save. This
# may be called twice, even at the same time. With exit code 3 it leaves a request
# in the signal file: a trainer that begins to listen before the grace is over
# leaves at once.
#
# MIGRATOR_SIGNAL      the signal file, as the trainer has it
#                      (else MIGRATION_SIGNAL_PATH, else /tmp/migrator/signal)
# MIGRATOR_GRACE_S     the pod's terminationGracePeriodSeconds (30)
# MIGRATOR_HOOK_LOGS   directory of preStop.log (else that of MIGRATION_CKPT_PATH,
#                      else MIGRATOR_CKPT if it is a directory, else the signal file's)
set -u
LC_ALL=C
export LC_ALL

signal=${MIGRATOR_SIGNAL:-${MIGRATION_SIGNAL_PATH:-/tmp/migrator/signal}}
case $signal in /*) ;; *) signal=./$signal ;; esac
signal_dir=${signal%/*}
signal_dir=${signal_dir:-/}
lock=$signal_dir/.${signal##*/}.lock
pause=0.05
tab=$(printf '\t')
cr=$(printf '\r')

# The clock may be set while this runs; the uptime is not, and reading it starts no process.
now() { # -> $now_cs, hundredths of a second
    if read -r uptime _ 2>/dev/null </proc/uptime; then
        number "${uptime%.*}${uptime#*.}"
        now_cs=$number
    else
        now_cs=$(($(date +%s) * 100))
    fi
}

number() { # text -> $number, without the leading zeros that would make it octal; empty if it is none
    number=$1
    case $number in '' | *[!0-9]* | ?????????????*) number='' && return ;; esac
    while [ "${number#0}" != "$number" ] && [ "$number" != 0 ]; do number=${number#0}; done
}

hundredths() { # seconds, perhaps with a fraction -> $number, hundredths; empty if it is none
    case $1 in *.*) fraction=${1#*.}00 ;; *) fraction=00 ;; esac
    number "${1%%.*}${fraction%"${fraction#??}"}"
}

# Pods of one job may share the log, so each line has the host.
stamp() { printf '%s %s' "$(date '+%Y-%m-%d %H:%M:%S')" "$host"; }

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

# Nothing is logged before the request is written: the logs may be on slow storage.
log() { # line
    [ -n "$logs" ] || return 0
    if ! {
        if [ -z "$logged" ]; then mkdir -p "$logs" && printf 'stop: %s %s\n' "$clock" "$host" >>"$logs/preStop.log"; fi &&
            printf '%s\n' "$1" >>"$logs/preStop.log"
    } 2>/dev/null; then
        printf 'preStop: cannot write %s: name a directory that can be written in MIGRATOR_HOOK_LOGS\n' \
            "$logs/preStop.log" >&2
        logs=''
    fi
    logged=yes
}

finish() { # exit code, reason
    if [ "$1" -eq 0 ]; then
        log "$(stamp) finish ckpts!"
    else
        log "$(stamp) $2"
        printf 'preStop: %s\n' "$2" >&2
    fi
    exit "$1"
}

# An emptyDir outlives the container. Requests and answers of an earlier container must be ignored.
find_container() { # -> $container: the node's boot and when process 1 started; empty where /proc does not say
    container=''
    { read -r boot </proc/sys/kernel/random/boot_id && read -r stat </proc/1/stat; } 2>/dev/null || return 0
    # The name of the program, in parentheses, may contain blanks; the fields after it do not.
    # shellcheck disable=SC2086
    set -- ${stat##*) }
    [ $# -lt 20 ] || container=$boot/${20}
}

is_of_here() { # container; if it is not known, it may be this one
    [ -z "$1" ] || [ -z "$container" ] || [ "$1" = "$container" ]
}

read_signal() { # -> $word (empty: missing or garbage), $pids $request $deadline $of $ckpt $late $error
    word='' pids='' request='' deadline='' of='' ckpt='' late='' error=''
    [ -f "$signal" ] || return 0
    {
        # The last line may lack its newline, hence the test after each read.
        IFS=" $tab$cr" read -r word rest || [ -n "$word" ]
        case "$word $rest" in
            'init ' | 'save ' | 'resume ') ;;
            *) word='' && return 0 ;;
        esac
        while IFS= read -r line || [ -n "$line" ]; do
            line=${line%"$cr"}
            case $line in
                pids=*) pids=${line#*=} ;;
                request=*) request=${line#*=} ;;
                deadline=*) deadline=${line#*=} ;;
                container=*) of=${line#*=} ;;
                ckpt=*) ckpt=${line#*=} ;;
                late=*) late=${line#*=} ;;
                error=*) error=${line#*=} ;;
            esac
            line=
        done
    } 2>/dev/null <"$signal"
    return 0
}

is_alive() { # pid
    if read -r status 2>/dev/null <"/proc/$1/stat"; then
        # A zombie, which its parent has not reaped yet, cannot answer.
        status=${status##*) }
        case $status in [ZX]*) return 1 ;; *) return 0 ;; esac
    fi
    kill -0 "$1" 2>/dev/null || [ -d "/proc/$1" ]
}

anyone_alive() { # pids, separated by commas
    list=$1,
    while [ -n "$list" ]; do
        number "${list%%,*}"
        list=${list#*,}
        list=${list# }
        # A file that outlived its container may name the pid that this hook has now.
        [ -n "$number" ] && [ "$number" != "$$" ] && is_alive "$number" && return 0
    done
    return 1
}

# Ranks of one pod end one after the other, some of them after this hook's last look at the signal file.
all_finished() { # pids, separated by commas: each has noted that its script has finished
    list=$1,
    while [ -n "$list" ]; do
        number "${list%%,*}"
        list=${list#*,}
        list=${list# }
        is_noted "$number" || return 1
    done
}

is_noted() { # pid
    [ -f "$signal.ended" ] || return 1
    while read -r noted; do [ "$noted" != "$1" ] || return 0; done 2>/dev/null <"$signal.ended"
    return 1
}

# The trainer writes the progress of a long save into a separate file. Any other content is ignored.
read_progress() { # -> $written $total, in MB; $progress: both, empty if there are none
    progress=''
    [ -f "$signal.progress" ] || return 0
    # The shell's own `read` reads a whole line, and the line may be a gigabyte long.
    { progress=$(dd if="$signal.progress" bs=32 count=1); } 2>/dev/null
    case $progress in
        *[!0-9\ ]* | *\ *\ * | ????????????????????*) progress='' ;;
        [0-9]*\ [0-9]*)
            number "${progress% *}"
            written=$number
            number "${progress#* }"
            total=$number
            [ -n "$written" ] && [ "${total:-0}" -gt 0 ] && [ "$written" -le "$total" ] || progress=''
            ;;
        *) progress='' ;;
    esac
}

tell_progress() {
    [ "$now_cs" -ge "$tell_at" ] || return 0
    tell_at=$((now_cs + 50))
    read_progress
    [ -n "$progress" ] && [ "$progress" != "$told" ] || return 0
    [ -n "$teller" ] && is_alive "$teller" && return 0
    told=$progress
    tell_at=$((now_cs + 200))
    far="written $written of $total MB ($((100 * written / total)) %)"
    # Neither this shell nor its caller (through the output) waits for this: the volume
    # is busy, and a slow write to the log must not delay the answer.
    (
        exec </dev/null >/dev/null 2>&1
        log "$(stamp) $far, $(((give_up + margin_cs - now_cs) / 100)) s of the grace left"
    ) &
    teller=$!
}

# Between reading the file and writing the request no other hook may write one: it would be overwritten.
lock() {
    until (set -C && printf '%s\n' "$$" >"$lock") 2>/dev/null; do
        # After half a second go on without it. Either a hook was killed while it held the lock; or the directory
        # cannot be written, and then writing the request fails.
        now
        [ $((now_cs - started)) -lt 50 ] && [ -e "$lock" ] || return 0
        rest_a_little
    done
}

unlock() { rm -f "$lock" 2>/dev/null; }

rest_a_little() {
    sleep "$pause" 2>/dev/null && return 0
    pause=1
    sleep 1
}

put_request() { # further lines; false if it cannot be written
    aside=$signal_dir/.${signal##*/}.$host.$$.tmp
    if ! {
        [ ! -d "$signal" ] &&
            printf 'save\nrequest=%s\npod=%s\ncontainer=%s\ndeadline=%s\n%s' \
                "$mine" "$host" "$container" "$kill_at" "$1" >"$aside" && mv -f "$aside" "$signal"
    } 2>/dev/null; then
        rm -f "$aside" 2>/dev/null
        return 1
    fi
}

write_request() { # pids -> asks under the id $mine
    put_request "hook=$$
pids=$1
" && return 0
    unlock
    finish 7 "cannot write the signal file $signal: set MIGRATOR_SIGNAL to a file in a directory that the trainer and this hook can write"
}

# No hook waits for an answer to this request. Without it a trainer that is still importing would train until it is killed.
leave_request() { # reason
    if is_open || put_request ''; then
        left='a trainer that begins to listen before the grace is over leaves at once'
    else
        left='a request for one that begins to listen cannot be left there'
    fi
    unlock
    finish 3 "$1; $left"
}

is_open() { # the file holds a request of this container whose deadline is not over
    hundredths "$deadline"
    deadline_cs=${number:-0}
    [ "$word" = save ] && [ -n "$request" ] && [ "$deadline_cs" -gt "$began_cs" ]
}

# An answer to this hook, to a hook that it joined, or without the id of a request.
is_for_us() {
    [ -z "$request" ] && return 0
    case $known in *" $request "*) return 0 ;; *) return 1 ;; esac
}

report() { # what the answer says
    case $word in
        resume)
            [ -z "$late" ] || finish 8 "saved, but $late"
            finish 0 saved
            ;;
        *) finish 6 "the trainer could not save: ${error:-it gave no reason}" ;;
    esac
}

grace() { # -> $grace_cs
    hundredths "${MIGRATOR_GRACE_S:-30}"
    grace_cs=${number:-0}
    if [ "$grace_cs" -eq 0 ]; then
        printf 'preStop: MIGRATOR_GRACE_S=%s is no number of seconds above 0; taking 30\n' "$MIGRATOR_GRACE_S" >&2
        grace_cs=3000
    fi
}

logged=''
now
started=$now_cs
form='%a %b %e %H:%M:%S %Z %Y'
clock=$(date "+%s.%N|$form")
# Some versions of `date` do not know %N, and some of these then print nothing at all.
case $clock in *.[0-9][0-9]*'|'*) ;; *) clock=$(date "+%s|$form") ;; esac
hundredths "${clock%%|*}"
began_cs=$number
clock=${clock#*|}
grace
# Reserve for the last poll and the log before SIGKILL: 1 s, or a tenth of a grace below 10 s.
if [ "$grace_cs" -lt 1000 ]; then margin_cs=$((grace_cs / 10)); else margin_cs=100; fi
give_up=$((started + grace_cs - margin_cs))
kill_at_cs=$((began_cs + grace_cs))
kill_at=$((kill_at_cs / 100)).$((kill_at_cs / 10 % 10))
{ read -r host </proc/sys/kernel/hostname; } 2>/dev/null || host=unknown
mine=$$-$((began_cs / 100))-$host
log_dir
find_container

{ [ -d "$signal_dir" ] || mkdir -p "$signal_dir"; } 2>/dev/null
[ -d "$signal_dir" ] && lock
read_signal
is_of_here "$of" || word='' pids=''
waiting_for=$pids
known=" $mine $request "
if { [ "$word" = resume ] && [ -n "$ckpt" ]; } || { [ "$word" = init ] && [ -n "$error" ] && [ -n "$request" ]; }; then
    unlock
    report
elif [ -e "$signal" ] && [ ! -r "$signal" ]; then
    unlock
    finish 7 "cannot read the signal file $signal: run the trainer and this hook as the same user"
elif [ -z "$word" ]; then
    leave_request "no trainer listens: there is no signal file at $signal, or nothing in it that a trainer of this container wrote"
elif [ -z "$pids" ] && { [ "$word" != save ] || [ -n "$of" ]; }; then
    leave_request "no trainer listens: the signal file $signal names nobody"
elif [ -n "$pids" ] && ! anyone_alive "$pids"; then
    leave_request "no trainer: nobody of those named in $signal is alive (pids $pids)"
elif is_open; then
    # Another hook has made a request already, so this one joins it. The grace began with that one.
    until_then=$((started + deadline_cs - began_cs - margin_cs))
    [ "$until_then" -lt "$give_up" ] && give_up=$until_then
else
    write_request "$pids"
fi
unlock
log "$(stamp) saving ckpts..."

far='' teller='' tell_at=$((started + 100))
# Progress that an earlier life left there is not reported, only changes of it.
read_progress
told=$progress
dead=0
while :; do
    read_signal
    case $word in
        resume) is_for_us && report ;;
        init)
            if [ -n "$error" ] || [ -n "$request" ]; then
                is_for_us && report
            else
                # A trainer began to listen just when the request was written, and overwrote it.
                [ -n "$pids" ] && anyone_alive "$pids" && waiting_for=$pids && write_request "$pids"
            fi
            ;;
        save)
            # Another request has replaced ours: an answer to it is for this hook too.
            is_for_us || known="$known$request "
            [ -n "$pids" ] && waiting_for=$pids
            ;;
        *)
            if [ ! -e "$signal" ]; then
                lock
                leave_request "the trainer finished by itself: it took the signal file away"
            fi
            ;;
    esac
    if [ -n "$waiting_for" ] && ! anyone_alive "$waiting_for"; then
        dead=$((dead + 1))
        # Look once more: the answer may have been the last thing it wrote.
        [ "$dead" -ge 2 ] && all_finished "$waiting_for" && finish 3 "the trainer finished by itself"
        [ "$dead" -ge 2 ] && finish 4 "the trainer died before it answered (pids $waiting_for)"
    else
        dead=0
    fi
    now
    [ "$now_cs" -ge "$give_up" ] && break
    [ "$pause" = 1 ] && [ $((now_cs + 100)) -gt "$give_up" ] && break
    tell_progress
    rest_a_little
done
finish 5 "no answer from the trainer within $(((now_cs - started) / 100)).$(((now_cs - started) / 10 % 10)) s of a grace of $((grace_cs / 100)) s${far:+: $far}"
