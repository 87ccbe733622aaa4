(* T1 on vectors in blocks, from the descent lemma: nothing is assumed but that grad is the gradient of f along
   lines and that its block i is L i-Lipschitz along block i. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Vectors Blocks DescentLemma.
Open Scope R_scope.

(* grad x is the gradient of f: the derivative along every line is the inner product *)
Definition is_gradient (n : nat) (f : vec -> R) (grad : vec -> vec) : Prop :=
  forall x v t, is_derive (fun s => f (axpy x s v)) t (dot n (grad (axpy x t v)) v).

Definition block_lipschitz (n : nat) (blk : nat -> nat) (grad : vec -> vec) (L : nat -> R) : Prop :=
  forall i x d, nrm n (proj blk i (vsub (grad (axpy x 1 (proj blk i d))) (grad x)))
                <= L i * nrm n (proj blk i d).

Definition lipschitz (n : nat) (grad : vec -> vec) (L : R) : Prop :=
  forall x y, nrm n (vsub (grad x) (grad y)) <= L * nrm n (vsub x y).

(* what the later proofs use *)
Definition block_smooth (n : nat) (blk : nat -> nat) (f : vec -> R) (grad : vec -> vec) (L : nat -> R) : Prop :=
  forall i x a d, f (axpy x a (proj blk i d))
    <= f x + a * dot n (proj blk i (grad x)) (proj blk i d) + L i / 2 * a ^ 2 * nrm n (proj blk i d) ^ 2.

Lemma nrm_scaled n blk i t d :
  nrm n (proj blk i (fun j => t * d j)) = Rabs t * nrm n (proj blk i d).
Proof.
  unfold nrm. rewrite <- (sqrt_Rsqr_abs t), <- sqrt_mult by (apply Rle_0_sqr || apply dot_self_nonneg).
  f_equal. unfold dot, Rsqr. rewrite <- psum_scal. apply psum_ext.
  intros j _. unfold proj. destruct (Nat.eqb (blk j) i); ring.
Qed.

Theorem block_upper_bound : forall n blk f grad L,
  is_gradient n f grad -> block_lipschitz n blk grad L -> block_smooth n blk f grad L.
Proof.
  intros n blk f grad L G B i x a d. set (v := fun j => a * d j).
  assert (Ev : forall s, axpy x s (proj blk i v) = axpy x (s * a) (proj blk i d)).
  { intros s. apply functional_extensionality. intros j. unfold axpy, proj, v.
    destruct (Nat.eqb (blk j) i); ring. }
  assert (E0 : axpy x 0 (proj blk i v) = x)
    by (apply functional_extensionality; intros j; unfold axpy; ring).
  pose proof (descent_lemma (fun t => f (axpy x t (proj blk i v)))
    (fun t => dot n (grad (axpy x t (proj blk i v))) (proj blk i v))
    (L i * nrm n (proj blk i v) ^ 2)) as D. cbv beta in D.
  rewrite E0 in D. rewrite (Ev 1), Rmult_1_l in D.
  assert (Nv : nrm n (proj blk i v) ^ 2 = a ^ 2 * nrm n (proj blk i d) ^ 2)
    by (unfold v; rewrite nrm_scaled, Rpow_mult_distr, pow2_abs; reflexivity).
  assert (Dv : dot n (grad x) (proj blk i v) = a * dot n (proj blk i (grad x)) (proj blk i d)).
  { rewrite dot_proj_r. unfold dot. rewrite <- psum_scal. apply psum_ext. intros j _.
    unfold proj, v. destruct (Nat.eqb (blk j) i); ring. }
  rewrite Dv, Nv in D.
  refine (Rle_trans _ _ _ (D _ _) _); [| |lra].
  - intros t _. apply G.
  - intros t Ht. rewrite <- Dv, <- Nv.
    pose proof (B i x (fun j => t * v j)) as Bt.
    replace (axpy x 1 (proj blk i (fun j => t * v j))) with (axpy x t (proj blk i v)) in Bt
      by (apply functional_extensionality; intros j; unfold axpy, proj; destruct (Nat.eqb (blk j) i); ring).
    rewrite nrm_scaled, Rabs_pos_eq in Bt by lra.
    set (w := proj blk i v) in *. set (y := axpy x t w) in *.
    replace (dot n (grad y) w - dot n (grad x) w) with (dot n (vsub (grad y) (grad x)) w)
      by (rewrite (dot_comm n _ w), dot_vsub_r, !(dot_comm n w); reflexivity).
    unfold w at 1. rewrite dot_proj_r. fold w.
    eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply cauchy_schwarz|].
    pose proof (nrm_nonneg n w). nra.
Qed.

(* T1: one exact step on block i. *)
Theorem block_descent : forall n blk f grad L i x eta,
  is_gradient n f grad -> block_lipschitz n blk grad L ->
  f (axpy x (- eta) (proj blk i (grad x)))
    <= f x - eta * (1 - eta * L i / 2) * nrm n (proj blk i (grad x)) ^ 2.
Proof.
  intros n blk f grad L i x eta G B.
  pose proof (block_upper_bound n blk f grad L G B i x (- eta) (grad x)) as U.
  rewrite <- nrm_sq in U. lra.
Qed.

Corollary block_descent_monotone : forall n blk f grad L i x eta,
  is_gradient n f grad -> block_lipschitz n blk grad L -> 0 < L i -> 0 < eta < 2 / L i ->
  f (axpy x (- eta) (proj blk i (grad x))) <= f x /\
  (0 < nrm n (proj blk i (grad x)) -> f (axpy x (- eta) (proj blk i (grad x))) < f x).
Proof.
  intros n blk f grad L i x eta G B HL [H0 H1].
  pose proof (block_descent n blk f grad L i x eta G B) as D.
  apply (Rmult_lt_compat_r _ _ _ HL) in H1.
  replace (2 / L i * L i) with 2 in H1 by (field; lra).
  assert (K : 0 < eta * (1 - eta * L i / 2)) by (apply Rmult_lt_0_compat; lra).
  split; [|intros N]; [pose proof (pow2_ge_0 (nrm n (proj blk i (grad x))))|pose proof (pow_lt _ 2 N)]; nra.
Qed.
