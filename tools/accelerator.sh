#!/bin/sh
# Prints the extra that fits the NVIDIA driver of this machine: cuda13, cuda12, or
# nothing where there is no driver. CUDA 13 needs driver 580, CUDA 12 needs 525.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null |
    sed -n '1s/\..*//p')
case $driver in
    '' | *[!0-9]*) exit 0 ;;
esac
if [ "$driver" -ge 580 ]; then
    echo cuda13
elif [ "$driver" -ge 525 ]; then
    echo cuda12
else
    echo "NVIDIA driver $driver is older than 525: the CPU is used." >&2
fi
