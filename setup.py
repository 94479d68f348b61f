"""Kept for tools that look for it; every setting lives in setup.cfg."""

from setuptools import setup

setup()
