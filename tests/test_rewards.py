"""Reward functions that other tests name as `module:function`."""


def two(trajectory):
    return 2.0


def nothing(trajectory):
    return None
