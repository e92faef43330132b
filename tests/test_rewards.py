"""Reward functions that other tests name as `module:function`."""


def one(trajectory):
    return 1.0


def two(trajectory):
    return 2.0


def nothing(trajectory):
    return None


def hang(trajectory):
    return 0.0 if 9**9**9 else 1.0  # in C, where no signal is heard


def die(trajectory):
    import os

    os._exit(1)
