"""Which addresses belong to this machine's own network: itself, its neighbours, and what only they can reach."""

import ipaddress
import socket

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TRANSLATED = ipaddress.ip_network("::ffff:0:0:0/96")
# What Python's own table leaves out, or counts as public: a network's own translators, and addresses at which clouds
# give credentials to their machines alone.
_NEAR = [ipaddress.ip_network(each) for each in ("64:ff9b:1::/48", "192.0.0.0/24", "168.63.129.16/32")]
_NAMES = (".localhost", ".local", ".internal")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_inside(host: str) -> bool:
    """Whether a name or an address, however it is spelled, is in this machine's own network. Makes no request."""
    address = _parse_address(host.rstrip("."))
    if address is not None:
        return _is_near(address)
    return f".{host.lower().rstrip('.')}".endswith(_NAMES)


def resolves_inside(host: str) -> bool:
    """Whether any address of a name is in this machine's own network; a name without an address is not."""
    if is_inside(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(is_inside(str(each[4][0])) for each in found)


def _parse_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 2130706433 and 0x7f.1 are addresses too
    except (OSError, ValueError):
        return None


def _is_near(address: Address) -> bool:
    address = _as_ipv4(address)
    if any(address in network for network in _NEAR):
        return True
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        return True
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return True
    return not address.is_global  # loopback, private, unique local, shared by a provider's customers, reserved


def _as_ipv4(address: Address) -> Address:
    """The address of IPv4 that one of IPv6 stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64 or address in _TRANSLATED or (int(address) >> 32 == 0 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address
