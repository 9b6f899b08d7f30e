"""Who looks at a page, as a parameter of its route; the page shows what they may do, no more."""

from __future__ import annotations

from typing import Annotated

from service.http.access import Caller, Scope, needs

Reader = Annotated[Caller, needs(Scope.READ)]
Tuner = Annotated[Caller, needs(Scope.TUNE)]
Admin = Annotated[Caller, needs(Scope.ADMIN)]
