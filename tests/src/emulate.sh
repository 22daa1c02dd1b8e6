# Runs a program for another processor: emulate.sh MAGIC EMULATOR PROGRAM ARGUMENTS...
# The kernel starts the emulator for ELF files that begin with MAGIC, in this user namespace only.
# It must be the kernel, because the program executes /proc/self/exe to compile policies.
set -eu
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
# The mask admits any ABI, and executables at any address. F: the kernel opens the emulator now.
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf ':emulated:M::%s:%s:%s:F' "$1" "$mask" "$2" >/proc/sys/fs/binfmt_misc/register
shift 2
exec "$@"
