#!/usr/bin/env bash
# Make a Debian root for ARM64 with Quadriga's dependencies, and run the whole server in it under QEMU:
#
#     sudo tests/arm64/make_root.sh /var/tmp/arm64          # once: two minutes, 2 GB
#     sudo tests/arm64/make_root.sh /var/tmp/arm64 serve    # tests/arm64/serve_models.py in it;
#                                                           # models may follow: Llama Qwen3
#
# Needs debootstrap, qemu-user-static and g++-aarch64-linux-gnu of Debian, and a kernel with
# binfmt_misc, by which programs that programs start run under QEMU, too. The registration ends with
# the script. The kernels are those of a wheel, by the cross-compiler: a process with threads that
# starts a compiler can hang under QEMU. FEATURES says which CPU /proc/cpuinfo shows.
set -euo pipefail
root=$1/root wheels=$1/wheels
repository=$(cd "$(dirname "$0")/../.." && pwd)
torch="torch==2.10.0" # the newest whose wheel for ARM64 is a build for CPUs
formats=/proc/sys/fs/binfmt_misc
mkdir -p "$root" "$wheels"
# The mounts are of this process and its children only.
[ -n "${QUADRIGA_UNSHARED:-}" ] || QUADRIGA_UNSHARED=1 exec unshare --mount "$0" "$@"

register() {
    mountpoint -q $formats || mount -t binfmt_misc binfmt_misc $formats
    [ -e $formats/quadriga-aarch64 ] && return
    # The machine of ELF files, and QEMU kept open, as the root has none.
    printf '%s' ':quadriga-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:/usr/bin/qemu-aarch64-static:F' \
        >$formats/register
}
unregister() { echo -1 >$formats/quadriga-aarch64; }
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"; }

register
trap unregister EXIT
if [ ! -x "$root/usr/bin/python3" ]; then
    debootstrap --foreign --arch arm64 --variant=minbase --include=python3,libstdc++6,libgomp1 \
        bookworm "$root"
    # Unpacked here in place of the second stage, which takes minutes under QEMU.
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    echo root:x:0:0::/root:/bin/bash >"$root/etc/passwd"
fi
mkdir -p "$root/dev" "$root/proc" "$root/root"
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"
features=${FEATURES:-fp asimd atomics asimdrdm asimddp sve i8mm bf16}
printf 'processor\t: %s\nFeatures\t: %s\n\n' 0 "$features" 1 "$features" >"$1/cpuinfo"
mount --bind "$1/cpuinfo" "$root/proc/cpuinfo"
if [ ! -e "$root/venv/ready" ]; then
    target=(--only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3
        --abi none --platform manylinux_2_31_aarch64 --platform manylinux_2_28_aarch64
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform any)
    # Without its dependencies, as pip takes those of this machine's CPU; then they follow.
    python3 -m pip download -q -d "$wheels" --no-deps "${target[@]}" "$torch"
    python3 -m pip download -q -d "$wheels" "${target[@]}" filelock typing-extensions sympy networkx \
        fsspec jinja2 numpy pyzmq msgspec tqdm tokenizers safetensors gguf huggingface_hub uvloop \
        psutil sortedcontainers msgpack regex 'llguidance>=1.7,<2' aiohttp prometheus_client PyYAML \
        'transformers>=5' setuptools
    mkdir -p "$root/venv" # pip of this machine unpacks the wheels: it is faster
    python3 -m pip install -q --target "$root/venv" --no-deps --no-compile "${target[@]}" \
        "$wheels"/*.whl
    touch "$root/venv/ready"
fi
rm -rf "$root/quadriga" && mkdir "$root/quadriga"
git -C "$repository" archive HEAD | tar x -C "$root/quadriga"
[ "${2:-}" = serve ] || exit 0
(cd "$root/quadriga" && CXX=aarch64-linux-gnu-g++ python3 -c \
    'from worker_proc.cpu.levels import PREBUILT, build; build("aarch64", PREBUILT)')
inside PYTHONPATH=/venv:/quadriga PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=2 \
    QEMU_CPU="${QEMU_CPU:-max,pauth-impdef=on}" \
    python3 /quadriga/tests/arm64/serve_models.py "${@:3}"
