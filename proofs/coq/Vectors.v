(* Vectors of R^n as functions nat -> R of which only the entries i < n count: inner product, norm,
   Cauchy-Schwarz and the triangle inequality, from scratch. A finite sequence is such a vector too. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum.
Open Scope R_scope.

Definition vec := nat -> R.                       (* only entries i < n count *)
Definition dot (n : nat) (x y : vec) : R := psum (fun i => x i * y i) n.
Definition nrm (n : nat) (x : vec) : R := sqrt (dot n x x).
Definition vsub (x y : vec) : vec := fun i => x i - y i.
Definition axpy (x : vec) (a : R) (y : vec) : vec := fun i => x i + a * y i.

Lemma dot_self_nonneg n x : 0 <= dot n x x.
Proof. apply psum_nonneg. intros. nra. Qed.

Lemma nrm_nonneg n x : 0 <= nrm n x.
Proof. apply sqrt_pos. Qed.

Lemma nrm_sq n x : nrm n x ^ 2 = dot n x x.
Proof. apply pow2_sqrt, dot_self_nonneg. Qed.

Lemma dot_axpy_sq n x a y :
  dot n (axpy x a y) (axpy x a y)
    = dot n x x + 2 * a * dot n x y + a ^ 2 * dot n y y.
Proof.
  unfold dot, axpy. rewrite <- !psum_scal, <- !psum_plus.
  apply psum_ext. intros. ring.
Qed.

Lemma cauchy_schwarz_sq n x y : dot n x y ^ 2 <= dot n x x * dot n y y.
Proof.
  set (X := dot n x x). set (Y := dot n y y). set (A := dot n x y).
  assert (H : forall a, 0 <= X + 2 * a * A + a ^ 2 * Y)
    by (intros a; unfold X, Y, A; rewrite <- dot_axpy_sq; apply dot_self_nonneg).
  assert (HY : 0 <= Y) by apply dot_self_nonneg.
  destruct (Req_dec Y 0) as [Y0|Y0].
  - rewrite Y0 in *. destruct (Req_dec A 0) as [->|A0]; [lra|].
    specialize (H (- (X + 1) / (2 * A))).
    replace (2 * (- (X + 1) / (2 * A)) * A) with (- (X + 1)) in H by (field; exact A0).
    lra.
  - specialize (H (- A / Y)).
    assert (E : Y * (X + 2 * (- A / Y) * A + (- A / Y) ^ 2 * Y) = X * Y - A ^ 2)
      by (field; exact Y0).
    nra.
Qed.

Lemma cauchy_schwarz n x y : Rabs (dot n x y) <= nrm n x * nrm n y.
Proof.
  unfold nrm. rewrite <- sqrt_mult by apply dot_self_nonneg.
  rewrite <- sqrt_Rsqr_abs. apply sqrt_le_1_alt.
  unfold Rsqr. pose proof (cauchy_schwarz_sq n x y). lra.
Qed.


Lemma dot_comm n x y : dot n x y = dot n y x.
Proof. apply psum_ext. intros; ring. Qed.

Lemma dot_axpy_r n x y a z : dot n x (axpy y a z) = dot n x y + a * dot n x z.
Proof. unfold dot, axpy. rewrite <- psum_scal, <- psum_plus. apply psum_ext. intros; ring. Qed.

Lemma dot_vsub_r n x y z : dot n x (vsub y z) = dot n x y - dot n x z.
Proof.
  replace (vsub y z) with (axpy y (-1) z)
    by (apply functional_extensionality; intros; unfold axpy, vsub; ring).
  rewrite dot_axpy_r. ring.
Qed.

Lemma nrm_le_of_sq n x c : 0 <= c -> dot n x x <= c ^ 2 -> nrm n x <= c.
Proof.
  intros Hc H. unfold nrm. rewrite <- (sqrt_pow2 c Hc). apply sqrt_le_1_alt. exact H.
Qed.

Lemma nrm_axpy n x a y : nrm n (axpy x a y) <= nrm n x + Rabs a * nrm n y.
Proof.
  pose proof (nrm_nonneg n x) as X. pose proof (nrm_nonneg n y) as Y. pose proof (Rabs_pos a) as A.
  apply nrm_le_of_sq; [nra|]. rewrite dot_axpy_sq, <- !nrm_sq.
  pose proof (cauchy_schwarz n x y) as C.
  assert (E : a * dot n x y <= Rabs a * (nrm n x * nrm n y)).
  { eapply Rle_trans; [apply Rle_abs|]. rewrite Rabs_mult. apply Rmult_le_compat_l; assumption. }
  rewrite <- (pow2_abs a) at 1. nra.
Qed.

Lemma nrm_triangle n x y : nrm n (fun i => x i + y i) <= nrm n x + nrm n y.
Proof.
  replace (fun i => x i + y i) with (axpy x 1 y)
    by (apply functional_extensionality; intros; unfold axpy; ring).
  eapply Rle_trans; [apply nrm_axpy|]. rewrite Rabs_R1. lra.
Qed.

(* Minkowski, in the form in which the cycle bounds use it: no square roots. *)
Lemma minkowski n (s u e : nat -> R) A B : 0 <= A -> 0 <= B ->
  (forall i, (i < n)%nat -> 0 <= s i <= u i + e i) ->
  psum (fun i => u i ^ 2) n <= A ^ 2 -> psum (fun i => e i ^ 2) n <= B ^ 2 ->
  psum (fun i => s i ^ 2) n <= (A + B) ^ 2.
Proof.
  intros HA HB Hs HU HE.
  assert (sq : forall v : nat -> R, psum (fun i => v i ^ 2) n = dot n v v)
    by (intros; apply psum_ext; intros; ring).
  rewrite sq in HU, HE.
  apply Rle_trans with (psum (fun i => (u i + e i) ^ 2) n).
  - apply psum_le. intros i Hi. apply pow_incr, Hs, Hi.
  - rewrite (sq (fun i => u i + e i)), <- nrm_sq. apply pow_incr. split; [apply nrm_nonneg|].
    eapply Rle_trans; [apply nrm_triangle|].
    apply Rplus_le_compat; apply nrm_le_of_sq; assumption.
Qed.

(* The same over K cycles of p steps, each cycle bounded by its own sums. *)
Lemma minkowski_cycles (s u v : nat -> R) p K c G E : 0 <= c -> 0 <= G -> 0 <= E ->
  (forall k, 0 <= s k <= sqrt (psum (fun i => u (k * p + i)%nat ^ 2) p)
                         + c * sqrt (psum (fun i => v (k * p + i)%nat ^ 2) p)) ->
  psum (fun t => u t ^ 2) (K * p) <= G ^ 2 -> psum (fun t => v t ^ 2) (K * p) <= E ^ 2 ->
  psum (fun k => s k ^ 2) K <= (G + c * E) ^ 2.
Proof.
  intros Hc HG HE H HU HV.
  assert (pos : forall (a : nat -> R) k, 0 <= psum (fun i => a (k * p + i)%nat ^ 2) p)
    by (intros; apply psum_nonneg; intros; apply pow2_ge_0).
  apply (minkowski K _ (fun k => sqrt (psum (fun i => u (k * p + i)%nat ^ 2) p))
    (fun k => c * sqrt (psum (fun i => v (k * p + i)%nat ^ 2) p))); try assumption.
  - apply Rmult_le_pos; assumption.
  - intros k _. apply H.
  - rewrite (psum_ext _ _ _ (fun k _ => pow2_sqrt _ (pos u k))).
    rewrite <- (psum_cycles (fun t => u t ^ 2)). exact HU.
  - rewrite (psum_ext _ (fun k => c ^ 2 * psum (fun i => v (k * p + i)%nat ^ 2) p))
      by (intros k _; rewrite Rpow_mult_distr, pow2_sqrt by apply (pos v); reflexivity).
    rewrite psum_scal, (Rpow_mult_distr _ E). apply Rmult_le_compat_l; [apply pow2_ge_0|].
    rewrite <- (psum_cycles (fun t => v t ^ 2)). exact HV.
Qed.
