"""Trained runs into figures: scores by width, tables, a picture and one honest sentence."""
