"""Reward functions that other tests name as `module:function`."""


def one(trajectory):
    return 1.0


def two(trajectory):
    return 2.0


def nothing(trajectory):
    return None
