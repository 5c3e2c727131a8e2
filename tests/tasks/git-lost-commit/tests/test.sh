#!/bin/bash
python3 -m pytest -q --junitxml=/logs/verifier/junit.xml /tests/checks.py
echo $((! $?)) >/logs/verifier/reward.txt
