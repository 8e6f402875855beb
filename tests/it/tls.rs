//! TLS to the database.
//!
//! The half that speaks it needs the feature: `./with-postgres cargo test --all-features --test it tls`.

#[cfg(not(feature = "rustls"))]
#[actix_web::test]
async fn tls_that_is_asked_for_and_not_built_in_is_refused_by_name() {
    use actix_idempotency::{ErrorKind, migrations, pool};

    for url in
        ["postgres://alice:secret@127.0.0.1/shop?sslmode=require", "host=127.0.0.1 password=secret sslmode=require"]
    {
        for error in [pool(url).unwrap_err(), migrations::run(url).await.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Configuration);
            let text = format!("{error} {error:?}");
            assert!(
                text.contains("sslmode=require") && text.contains("`rustls`") && !text.contains("secret"),
                "{text}"
            );
        }
    }
    // What is asked for less firmly goes without.
    let db = crate::support::db::Db::new().await;
    let prefers = format!("{}?sslmode=prefer", db.url);
    assert!(pool(&prefers).unwrap().get().await.is_ok());
    migrations::run(&prefers).await.unwrap();
}

#[cfg(feature = "rustls")]
mod with_the_feature {
    use std::{env, fs, path::PathBuf, process::Command};

    use actix_idempotency::{ErrorKind, Idempotency, migrations, pool};

    use crate::support::{
        app::order,
        client::{RequestExt, client},
        cluster::Cluster,
        db::Db,
        missing,
        process::Setup,
    };

    /// A CA, and a certificate of `localhost` that it has signed.
    struct Certificates(PathBuf);

    impl Certificates {
        fn new() -> Option<Self> {
            if Command::new("openssl").arg("version").output().is_err() {
                missing("openssl");
                return None;
            }
            let directory = env::temp_dir().join(format!("it-tls-{}", std::process::id()));
            let _ = fs::remove_dir_all(&directory);
            fs::create_dir(&directory).unwrap();
            let certificates = Self(directory);
            certificates
                .openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=it-ca -keyout ca.key -out ca.crt");
            certificates.openssl("req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr");
            fs::write(certificates.file("extensions"), "subjectAltName=DNS:localhost").unwrap();
            certificates.openssl(
                "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extensions \
                 -out server.crt",
            );
            Some(certificates)
        }

        fn openssl(&self, arguments: &str) {
            let output = Command::new("openssl").args(arguments.split(' ')).current_dir(&self.0).output().unwrap();
            assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Certificates {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn server(certificates: &Certificates) -> Cluster {
        let key = certificates.file("server.key");
        // Postgres reads no key that others may read, and may run as somebody else.
        assert!(Command::new("chmod").arg("600").arg(&key).status().unwrap().success());
        if let Some(user) = env::var("POSTGRES_OS_USER").ok().filter(|user| !user.is_empty()) {
            assert!(Command::new("chown").arg(user).arg(&key).status().unwrap().success());
        }
        let setting = |name: &str, file: &str| format!("{name} = '{}'", certificates.file(file).display());
        Cluster::start(&["ssl = on", &setting("ssl_cert_file", "server.crt"), &setting("ssl_key_file", "server.key")])
    }

    fn by_tls(db: &Db) -> String {
        format!("{}?sslmode=require", db.url.replace("postgres@127.0.0.1", "tls@localhost"))
    }

    #[actix_web::test]
    async fn tls_is_spoken_to_a_server_whose_certificate_is_trusted_and_to_no_other() {
        let Some(certificates) = Certificates::new() else { return };
        let cluster = server(&certificates);
        // By the default, `sslmode=prefer`, which goes without where it must.
        let db = Db::on(&cluster.url()).await;
        db.run("CREATE ROLE tls SUPERUSER LOGIN").await;

        // SSL_CERT_FILE is read by a process of its own.
        let process = Setup { trusted: Some(certificates.file("ca.crt")), ..Setup::new(&by_tls(&db)) }.start();
        let send = || client().post(process.url("/orders")).key("x").json(&order("x")).answer();
        let first = send().await;
        assert_eq!(first.status, 201, "{}", first.text());
        first.assert_replayed_by(&send().await);
        let encrypted = "EXISTS (SELECT FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'tls' AND ssl) \
                         AND NOT EXISTS (SELECT FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                         WHERE usename = 'tls' AND NOT ssl)";
        assert!(db.is(encrypted).await);

        // This process trusts whom the system trusts.
        let check = Idempotency::postgres(pool(&by_tls(&db)).unwrap()).check().await.unwrap_err();
        let run = migrations::run(&by_tls(&db)).await.unwrap_err();
        for error in [check, run] {
            assert_eq!(error.kind(), ErrorKind::Connection);
            assert!(format!("{error:?}").to_lowercase().contains("certificate"), "{error:?}");
        }
    }
}
