"""Runs on Kubernetes."""
