# Enter a machine's root in the namespaces of this process, then run a command: sh machine.sh NAME=VALUE … COMMAND …
# Its settings come as variables from machine.py. It writes "built" to descriptor 3 before the command begins.
set -eu
mount --fstab "$MOUNTS" --all
cd "$ROOT"
pivot_root . old
umount --lazy old
cd "$DIRECTORY" 2>/dev/null || cd /
set +e
echo sandbox 2>/dev/null > /proc/sys/kernel/hostname
# Shared memory and messages of System V stay without a process that holds them: 64 MiB and a few queues.
echo 16384 2>/dev/null > /proc/sys/kernel/shmall
echo 64 2>/dev/null > /proc/sys/kernel/msgmni

# This process stays the first one of the namespace: it ends with whoever started it, and the kernel ends all others with
# it. The command gets no variable of ours, no capability, and no way to make a namespace. Limits are set last.
[ -z "$OUTSIDE" ] || outside="setpriv --reuid $OUTSIDE --regid $OUTSIDE --clear-groups unshare --user --map-root-user"
echo built >&3
exec 3>&-
${outside:-} prlimit --nproc="$PROCESSES" --fsize="$FILE_BYTES" --core=0 --nofile=4096 sh -c '
    echo 0 > /proc/sys/user/max_user_namespaces
    exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs env -i "$@"' sh "$@"
exit $?
