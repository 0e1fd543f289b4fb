"""Analyses of trained models: attention statistics, and translations with wrong trees."""
