"""Makes the certificates with which crow's proxy answers commands in place of a host.

The private keys exist only in crow's memory.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LASTS = timedelta(days=365)
"""How long a certificate is valid."""
_USAGE = {
    **dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"), False),
    **dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False),
    **dict.fromkeys(("key_cert_sign", "crl_sign"), True),
}


class Authority:
    """A certificate authority whose certificates are valid only for the host names `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "crow, for commands of one session")])
        places = x509.NameConstraints(
            permitted_subtrees=[x509.DNSName(name) for name in names],
            excluded_subtrees=[x509.IPAddress(ip_network(every)) for every in ("0.0.0.0/0", "::/0")],
        )
        certificate = (
            self._begin(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(places, critical=True)
            .add_extension(x509.KeyUsage(**_USAGE), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        """The certificate that commands trust."""

    def context(self, name: str) -> ssl.SSLContext:
        """Return a TLS context for a server that answers in place of the host `name`. It speaks HTTP/1.1 only, and
        refuses clients that name another host."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._begin(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]), key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with open(os.memfd_create("crow"), "wb") as file:  # OpenSSL reads files only
            file.write(certificate.public_bytes(serialization.Encoding.PEM))
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            )
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = lambda _socket, asked, _context: (
            None if asked is not None and asked.lower() == name else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        )
        return context

    def _begin(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        """Return an unsigned certificate of this authority for the subject and its key."""
        now, own = datetime.now(UTC), self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + _LASTS)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own), critical=False)
        )
