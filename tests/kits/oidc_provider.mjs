// An OpenID Connect provider for tests. Arguments: the directory with node_modules, and a JSON file with the users.
// The provider reads the file again for each token, so a test can change the groups of a user.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";

const [directory, usersFile] = process.argv.slice(2);
const { default: Provider } = await import(pathToFileURL(`${directory}/node_modules/oidc-provider/lib/index.js`));
const server = createServer();
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const issuer = `http://127.0.0.1:${server.address().port}`;

const provider = new Provider(issuer, {
  clients: [
    {
      client_id: "portal",
      client_secret: process.env.OIDC_SECRET,
      redirect_uris: ["https://portal.example.net/login/callback"],
      grant_types: ["authorization_code", "refresh_token"],
    },
  ],
  claims: { openid: ["sub"], profile: ["preferred_username", "groups"] },
  conformIdTokenClaims: false, // the ID token contains the groups
  pkce: { required: () => true },
  rotateRefreshToken: true,
  issueRefreshToken: () => true,
  ttl: { IdToken: 86400, AccessToken: 3600, Session: 86400, Grant: 86400, RefreshToken: 86400, Interaction: 600 },
  cookies: { keys: ["a key for tests"] },
  async findAccount(_, accountId) {
    const claims = JSON.parse(readFileSync(usersFile, "utf8"))[accountId];
    return claims && { accountId, claims: async () => ({ sub: accountId, ...claims }) };
  },
  async loadExistingGrant({ oidc }) {
    const grant = new provider.Grant({ accountId: oidc.session.accountId, clientId: oidc.client.clientId });
    grant.addOIDCScope("openid profile");
    await grant.save();
    return grant;
  },
});
server.on("request", provider.callback());
console.log(`issuer ${issuer}`);
