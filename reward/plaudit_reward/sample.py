"""The sample that reward functions receive. Defined in ``plaudit_wire.sample``; import it from here."""

from plaudit_wire.sample import Sample as Sample
