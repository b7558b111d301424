"""Stand-in for MoonEP."""

from rocm_standin import arrive

arrive(__name__)
