"""Chest X-rays: questions with structured answers, and the fourteen CheXpert labels, for MIMIC-CXR-JPG with MIMIC-Ext-CXR-QBA.

Research software. It is no medical device and must not be used for diagnosis.
"""
