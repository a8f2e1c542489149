# shellcheck shell=sh
# How the scripts run what takes its time; to be sourced, with `script` set to what the script calls itself.
#
# Ctrl-C reaches the script alone: each command has a session of its own, and the script ends it, with all that it
# started. So nothing goes on computing, Python prints no trace, and apt is not cut off half-way. What is to be
# cleaned up belongs into a trap on EXIT.

: "${script:?}"
running=
# Where to say that the script was interrupted, wherever the output of its commands goes.
exec 3>&2

# job COMMAND…: its exit status. A signal to the script ends it at once.
job() {
    running=job
    in_session "$@"
}

# whole COMMAND…: the same, for what must not be left half done: a signal waits for its end.
whole() {
    running=whole
    in_session "$@"
}

in_session() {
    setsid "$@" 3>&- &
    ended=0
    wait "$!" || ended=$?
    running=
    return "$ended"
}

# interrupted STATUS: what the script does about a signal.
interrupted() {
    trap '' INT TERM HUP
    [ ! -t 3 ] || printf '\n' >&3
    case $running in
    job)
        printf '%s: interrupted\n' "$script" >&3
        # Before it has its session, the command is alone.
        kill -s KILL -- "-$!" 2>/dev/null || kill -s KILL "$!" 2>/dev/null || true
        wait "$!" 2>/dev/null || true
        left=20
        while [ "$left" -gt 0 ] && kill -s 0 -- "-$!" 2>/dev/null; do
            sleep 0.1
            left=$((left - 1))
        done
        ;;
    whole)
        printf '%s: interrupted; what has begun is brought to its end first\n' "$script" >&3
        wait "$!" || true
        ;;
    *) printf '%s: interrupted\n' "$script" >&3 ;;
    esac
    exit "$1"
}

trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
