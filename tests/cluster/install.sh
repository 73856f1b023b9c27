#!/bin/sh
# Debian's Slurm, where it may be installed; elsewhere the tests that need it are skipped, and say so.
PATH="$PATH:/usr/sbin:/sbin"
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && exit 0
command -v apt-get >/dev/null || { echo "no apt-get: Slurm is not installed"; exit 0; }
root=""
[ "$(id -u)" = 0 ] || root="sudo -n"
export DEBIAN_FRONTEND=noninteractive
{ $root apt-get update -qq && $root apt-get install -y -qq slurm-wlm munge; } >/dev/null 2>&1 ||
  echo "Slurm could not be installed: apt-get install slurm-wlm munge"
