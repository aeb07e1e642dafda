"""Tests of exported documents."""
